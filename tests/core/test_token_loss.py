"""The loss of token labeling: the published numbers, sparse against dense in float64, and what it costs in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alltokens.core import geometry
from alltokens.core.kernels import sparse_cross_entropy as kernel
from alltokens.core.label_maps import LabelMap, sample_token_targets
from alltokens.core.losses import blend_targets, smooth_one_hot, soft_cross_entropy
from alltokens.core.plan import MixPlan, flipped_partner
from alltokens.core.token_loss import TokenLabelLoss, blend_ground_truth, draw_participants, token_loss
from alltokens.core.token_targets import TokenTargets
from alltokens.errors import UserError
from tests.golden_rules import golden_arrays, golden_json

GOLDEN = {name: torch.from_numpy(array) for name, array in golden_arrays("token_label_loss.npz").items()}


def random_targets(
    batch: int = 3, tail: str = "zero", classes: int = 7, smoothing: float = 0.0, left: float = 0.3
) -> TokenTargets:
    """Of turned crops, some of their tokens partly outside, on a grid that is not square."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(batch, 3, 5, 6, generator=generator, dtype=torch.float64) * 4 - 1
    ids = torch.rand(batch, classes, 5, 6, generator=generator).topk(3, 1).indices
    maps = LabelMap(ids, scores, torch.randn(batch, 5, 6, generator=generator, dtype=torch.float64))
    degrees = torch.arange(batch).double() * 25
    matrix = geometry.compose(
        geometry.rotate(degrees), geometry.crop(left, 0.1, 0.7, 0.8).double().expand(batch, -1, -1)
    )
    return sample_token_targets(maps, matrix, (3, 4), classes, smoothing, tail=tail)


def followed_targets(batch: int = 3, tail: str = "zero", smoothing: float = 0.0) -> TokenTargets:
    """The same after a box of the partner, moved about: with whole labels in common."""
    shares = torch.rand(batch, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    plan = MixPlan.from_box(flipped_partner(batch), (1, 5, 2, 7), (8, 8))
    return random_targets(batch, tail, smoothing=smoothing).follow(plan, shares, 7)


def random_logits(*shape: int, seed: int = 1) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul_(3).requires_grad_()
    )


@pytest.mark.parametrize("case", golden_json("token_label_loss.json"), ids=lambda case: str(case["i"]))
def test_published_losses_and_gradients(case):
    """The published program mixes no token label, it un-mixes the tokens; here labels are pasted where tokens are."""
    stored, (top, left, bottom, right) = GOLDEN[case["target"]], case["box"]
    plan = MixPlan.from_box(flipped_partner(4), (top, bottom, left, right), (3, 5), "embedding")
    pasted = plan.token_share((3, 5)).flatten(1).unsqueeze(-1) > 0  # (B, N, 1)
    class_targets = stored if stored.ndim == 2 else stored[..., 1]
    if case["ground_truth"]:
        truth = stored if stored.ndim == 2 else stored[..., 0]
        class_targets = blend_ground_truth(class_targets, truth, "official")
    class_targets = blend_targets(class_targets, plan.partner, plan.share)
    own = stored if stored.ndim == 2 else stored[..., 2:].mT  # one label for all tokens, or their own
    targets = (
        own if stored.ndim == 2 and not pasted.any() else blend_targets(own, plan.partner, pasted.squeeze(-1).float())
    )

    def exchanged(tokens: Tensor) -> Tensor:
        return torch.where(pasted, tokens[plan.partner], tokens)

    logits = GOLDEN["cls"].clone().requires_grad_()
    token_logits = exchanged(GOLDEN["aux"]).requires_grad_()
    loss = TokenLabelLoss(case["dense_weight"], case["cls_weight"])((logits, token_logits), class_targets, targets)
    assert loss.item() == pytest.approx(case["loss"], abs=2e-5)
    loss.backward()
    assert logits.grad is not None
    assert token_logits.grad is not None
    torch.testing.assert_close(logits.grad, GOLDEN[f"{case['i']}_grad_cls"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(exchanged(token_logits.grad), GOLDEN[f"{case['i']}_grad_aux"], atol=2e-5, rtol=1e-4)


def test_published_loss_of_one_label_per_picture():
    loss = soft_cross_entropy(GOLDEN["cls"], GOLDEN["target3"][..., 1])
    assert loss.item() == pytest.approx(GOLDEN["softtarget_2ch_loss"].item(), abs=2e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tail", ["zero", "true"])
@pytest.mark.parametrize("batch", [1, 3])
def test_sparse_is_dense_in_float64_with_gradients(batch, tail, smoothing):
    targets = random_targets(batch, tail, smoothing=smoothing)
    wide = torch.rand(batch, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    box = torch.tensor([[1, 5, 2, 7], [0, 0, 0, 0], [0, 8, 3, 4]])[:batch]
    mixed = targets.mix(MixPlan.from_box(flipped_partner(batch), box, (8, 8)))
    for sparse in (targets, mixed, followed_targets(batch, tail, smoothing), TokenTargets.of_pictures(wide, (3, 4))):
        logits = random_logits(batch, 12, 7)
        got = token_loss(logits, sparse)
        want = token_loss(logits, sparse.dense(7), sparse.weight)
        torch.testing.assert_close(got, want)
        (got_gradient,) = torch.autograd.grad(got, logits)
        (want_gradient,) = torch.autograd.grad(want, logits)
        torch.testing.assert_close(got_gradient, want_gradient)


def test_gradients_are_those_of_finite_differences():
    targets = followed_targets(2, "true", smoothing=0.1)
    assert torch.autograd.gradcheck(lambda logits: token_loss(logits, targets), random_logits(2, 12, 7))


def test_the_op_keeps_torchs_contract():
    targets = followed_targets(2)
    assert targets.common is not None
    arguments = (random_logits(2, 12, 7), *targets[:3], *targets.common)
    torch.library.opcheck(torch.ops.alltokens.sparse_cross_entropy.default, arguments)


@pytest.mark.parametrize("pictures", [1, 2])
def test_pictures_by_stretches_are_pictures_at_once(monkeypatch, pictures):
    targets, logits = followed_targets(3), random_logits(3, 12, 7)
    loss = token_loss(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits)
    monkeypatch.setitem(kernel.LOGITS_AT_ONCE, "cpu", pictures * 12 * 7 + 3)
    by_stretches = token_loss(logits, targets)
    assert torch.equal(by_stretches, loss)
    assert torch.equal(torch.autograd.grad(by_stretches, logits)[0], gradient)


def test_half_precision_logits_give_a_float32_loss_and_their_own_gradient():
    targets = random_targets(3)
    logits = random_logits(3, 12, 7).detach().bfloat16().requires_grad_()
    loss = token_loss(logits, targets)
    assert loss.dtype == torch.float32
    exact = logits.detach().float().requires_grad_()
    expected = token_loss(exact, targets.dense(7), targets.weight)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, exact)[0].bfloat16())


def test_hard_labels_are_torchs_cross_entropy():
    labels = torch.tensor([[0, 4, 2], [6, 6, 1]])
    one, none = torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    logits = random_logits(2, 3, 7)
    loss = token_loss(logits, TokenTargets(labels[..., None], one[..., None], none, one, (1, 3)))
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_many_classes_and_extreme_logits():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(21843, (2, 3, 10), generator=generator)
    targets = TokenTargets(
        ids, torch.rand(2, 3, 10, generator=generator) / 10, torch.full((2, 3), 1e-5), torch.ones(2, 3), (1, 3)
    )
    logits = (100 * torch.randn(2, 3, 21843, generator=generator) + 1000).requires_grad_()
    loss = token_loss(logits, targets)
    torch.testing.assert_close(loss, token_loss(logits.double(), targets.dense(21843)).float(), rtol=1e-5, atol=0)
    assert torch.isfinite(torch.autograd.grad(loss, logits)[0]).all()


def test_tokens_without_label_carry_no_loss():
    targets = random_targets(3, left=0.8)
    outside = targets.weight == 0
    assert outside.any()
    assert not outside.all()
    logits = random_logits(3, 12, 7)
    (gradient,) = torch.autograd.grad(token_loss(logits, targets), logits)
    assert torch.equal(gradient.abs().sum(-1) == 0, outside)
    nowhere = targets._replace(weight=torch.zeros_like(targets.weight))
    assert token_loss(logits, nowhere).item() == 0
    assert torch.equal(torch.autograd.grad(token_loss(logits, nowhere), logits)[0], torch.zeros_like(logits))


def test_a_label_equal_to_the_prediction_has_no_gradient():
    targets = random_targets(3, smoothing=0.0)
    logits = targets.dense(7).log().requires_grad_()
    (gradient,) = torch.autograd.grad(token_loss(logits, targets), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_weights_of_the_two_losses():
    targets, logits, token_logits = random_targets(3), random_logits(3, 7, seed=2), random_logits(3, 12, 7)
    class_targets = smooth_one_hot(torch.tensor([1, 5, 0]), 7, 0.1).double()
    parts = TokenLabelLoss().parts((logits, token_logits), class_targets, targets)
    torch.testing.assert_close(parts.loss_class, soft_cross_entropy(logits, class_targets))
    torch.testing.assert_close(parts.loss_token, token_loss(token_logits, targets))
    loss = TokenLabelLoss(0.25, 2.0)((logits, token_logits), class_targets, targets)
    torch.testing.assert_close(loss, 2 * parts.loss_class + 0.25 * parts.loss_token)


def test_a_label_per_picture_serves_all_its_tokens():
    logits, targets = random_logits(3, 12, 7), random_targets(3).dense(7)[:, 0]
    torch.testing.assert_close(token_loss(logits, targets), token_loss(logits, targets[:, None].expand(-1, 12, -1)))


def test_a_share_of_each_pictures_tokens_takes_part():
    logits, targets = random_logits(3, 12, 7), random_targets(3)._replace(weight=torch.ones(3, 12))
    class_targets = torch.full((3, 7), 1 / 7).double()
    loss = TokenLabelLoss(participation=0.25)

    def gradient(seed: int) -> tuple[Tensor, Tensor]:
        parts = loss.parts((logits[:, 0], logits), class_targets, targets, torch.Generator().manual_seed(seed))
        return parts.loss_token, torch.autograd.grad(parts.loss_token, logits)[0]

    value, first = gradient(5)
    takes_part = first.abs().sum(-1) > 0
    assert takes_part.sum(1).tolist() == [3, 3, 3]
    expected = token_loss(logits, targets.dense(7), takes_part.double())
    torch.testing.assert_close(value, expected)
    assert torch.equal(gradient(5)[1], first)
    assert not torch.equal(gradient(6)[1], first)
    loss.eval()
    torch.testing.assert_close(gradient(5)[0], token_loss(logits, targets))


def test_every_token_takes_part_equally_often():
    generator = torch.Generator().manual_seed(0)
    total = sum(draw_participants(torch.zeros(64, 10, 1), 0.3, generator) for _ in range(100))
    assert isinstance(total, Tensor)
    rate = total.sum(0) / 6400
    torch.testing.assert_close(rate, torch.full((10,), 0.3), atol=0.03, rtol=0)  # 5 standard deviations of 0.0057


def test_inputs_stay_as_they_were():
    targets, logits = random_targets(3), random_logits(3, 12, 7)
    tensors = (*targets[:4], logits)
    before = [tensor.detach().clone() for tensor in tensors]
    token_loss(logits, targets).backward()
    assert all(torch.equal(was, now) for was, now in zip(before, tensors, strict=True))


def test_compiled_is_eager():
    targets, logits, token_logits = random_targets(3), random_logits(3, 7), random_logits(3, 12, 7)
    class_targets = smooth_one_hot(torch.tensor([1, 5, 0]), 7).double()
    loss = TokenLabelLoss()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got, want = (run((logits, token_logits), class_targets, targets) for run in (compiled, loss))
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(
        *(torch.autograd.grad(value, (logits, token_logits)) for value in (got, want)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_backward_keeps_no_second_copy_of_the_logits():
    """What a forward keeps for its backward: the logits themselves, the targets, and one number a row."""
    targets, kept = random_targets(3), []
    logits = random_logits(3, 12, 7).detach().bfloat16().requires_grad_()

    def remember(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        token_loss(logits, targets)
    large = [tensor for tensor in kept if tensor.shape[-1:] == (7,) and tensor.numel()]
    assert {tensor.data_ptr() for tensor in large} == {logits.data_ptr()}


@pytest.mark.parametrize(("rule", "shares"), [("official", (0.5, 0.9)), ("sensible", (0.9, 0.5))])
def test_ground_truth_is_blended_by_whether_the_map_agrees(rule, shares):
    label_map = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]])
    blended = blend_ground_truth(label_map, torch.tensor([0, 2]), rule)
    agreed, differed = shares
    expected = torch.stack(
        [
            agreed * label_map[0] + (1 - agreed) * torch.eye(3)[0],
            differed * label_map[1] + (1 - differed) * torch.eye(3)[2],
        ]
    )
    torch.testing.assert_close(blended, expected)
    torch.testing.assert_close(blend_ground_truth(label_map, torch.eye(3)[[0, 2]], rule), expected)


def test_what_cannot_work_is_refused():
    logits, targets = random_logits(3, 12, 7), random_targets(3)
    with pytest.raises(UserError, match="dense_weight"):
        TokenLabelLoss(-1)
    with pytest.raises(UserError, match="participation"):
        TokenLabelLoss(participation=0)
    with pytest.raises(UserError, match=r"targets for \(3, 12\) tokens"):
        token_loss(logits[:, :11], targets)
    with pytest.raises(UserError, match="dense targets must be"):
        token_loss(logits, targets.dense(8))
    with pytest.raises(UserError, match="unknown rule"):
        blend_ground_truth(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), "officially")
    with pytest.raises(UserError, match="labels must be"):
        blend_ground_truth(torch.zeros(2, 3), torch.zeros(2, 4))
