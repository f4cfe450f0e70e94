"""Attribution once more, the slow way: one picture, weights from a state dict, every product written out.

Shapes: T tokens, C width, d channels of a head.

Shares nothing with the package. Each rule is "value times gradient of the products, weighed by relevance / sum", and
that gradient comes from autograd, as in the paper's derivation. Everything is float64 and unbatched.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def safe(value, by):
    low = torch.full_like(by, 1e-9)
    moved = torch.maximum(by, low) + torch.minimum(by, low)
    moved[moved == 0] = 1e-9
    return value / moved * (by != 0)


def gradient(make, inputs, weight):
    """d(sum of weight * make(inputs)) / d inputs."""
    inputs = [one.detach().clone().requires_grad_() for one in inputs]
    return torch.autograd.grad((make(*inputs) * weight).sum(), inputs)


def linear(x, w, relevance):
    high, low, up, down = x.clamp(min=0), x.clamp(max=0), w.clamp(min=0), w.clamp(max=0)
    ratio = safe(relevance, high @ up.T + low @ down.T)
    (by_high,) = gradient(lambda one: one @ up.T, [high], ratio)
    (by_low,) = gradient(lambda one: one @ down.T, [low], ratio)
    return high * by_high + low * by_low


def product(make, a, b, relevance):
    """A bilinear operation: each factor takes value times gradient, halved."""
    by_a, by_b = gradient(make, [a, b], safe(relevance, make(a, b)))
    return a * by_a / 2, b * by_b / 2


def added(a, b, relevance):
    ratio = safe(relevance, a + b)
    parts = [a * ratio, b * ratio]
    sums = [part.sum() for part in parts]
    whole = sums[0].abs() + sums[1].abs()
    return [part * safe(safe(one.abs(), whole) * relevance.sum(), one) for part, one in zip(parts, sums, strict=True)]


def cloned(value, relevances):
    return value * sum(safe(one, value) for one in relevances)


def attribution(tokens, state, heads, eps, chosen, skip=1.0, scales=False):
    """(T,): tokens (T, C) entering the first block of a plain pre-norm ViT; `skip` divides every branch."""
    state = {name: value.double() for name, value in state.items()}
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    kept = []
    x = tokens.double().requires_grad_()
    for number in range(depth):
        block = {name: value for name, value in state.items() if name.startswith(f"blocks.{number}.")}
        block = {name.removeprefix(f"blocks.{number}."): value for name, value in block.items()}
        x, record = run_block(x, block, heads, eps, skip, scales)
        kept.append((block, record))
    final = F.layer_norm(x, x.shape[-1:], state["norm.weight"], state["norm.bias"], eps)
    logits = final[0] @ state["head.weight"].T + state["head.bias"]
    gradients = torch.autograd.grad(logits[chosen], [record["A"] for _, record in kept])

    relevance = torch.zeros_like(final)
    one_hot = torch.zeros_like(logits)
    one_hot[chosen] = 1
    relevance[0] = linear(final[0].detach(), state["head.weight"], one_hot)
    layers = []
    for (block, record), slope in zip(reversed(kept), reversed(gradients), strict=True):
        record = {name: value.detach() for name, value in record.items()}
        relevance, weights = back_block(record, block, relevance)
        layers.insert(0, (slope * weights).clamp(min=0).mean(0))
    joint = torch.eye(len(tokens), dtype=torch.float64)
    for layer in layers:
        joint = (layer + torch.eye(len(tokens), dtype=torch.float64)) @ joint
    return joint[0]


def run_block(x, block, heads, eps, skip, scales):
    width = x.shape[-1]
    gamma = [block[f"ls{place}.gamma"] if scales else torch.ones(width).double() for place in (1, 2)]
    normed = F.layer_norm(x, (width,), block["norm1.weight"], block["norm1.bias"], eps)
    qkv = normed @ block["attn.qkv.weight"].T + block.get("attn.qkv.bias", 0)
    q, k, v = qkv.reshape(len(x), 3, heads, width // heads).permute(1, 2, 0, 3)
    weights = (q @ k.transpose(1, 2) / (width // heads) ** 0.5).softmax(-1)
    joined = (weights @ v).transpose(0, 1).reshape(len(x), width)
    first = (joined @ block["attn.proj.weight"].T + block["attn.proj.bias"]) * gamma[0] / skip
    middle = x + first
    again = F.layer_norm(middle, (width,), block["norm2.weight"], block["norm2.bias"], eps)
    hidden = F.gelu(again @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"])
    second = (hidden @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"]) * gamma[1] / skip
    record = {"x": x, "normed": normed, "q": q, "k": k, "v": v, "A": weights, "joined": joined, "first": first}
    return middle + second, record | {"middle": middle, "again": again, "hidden": hidden, "second": second}


def back_block(seen, block, relevance):
    kept, branch = added(seen["middle"], seen["second"], relevance)
    branch = linear(seen["hidden"], block["mlp.fc2.weight"], branch)
    branch = linear(seen["again"], block["mlp.fc1.weight"], branch)
    relevance = cloned(seen["middle"], [kept, branch])
    kept, branch = added(seen["x"], seen["first"], relevance)
    branch = linear(seen["joined"], block["attn.proj.weight"], branch)
    heads, tokens, channels = seen["v"].shape
    branch = branch.reshape(tokens, heads, channels).transpose(0, 1)
    weights, value = product(torch.matmul, seen["A"], seen["v"], branch)
    query, key = product(lambda a, b: a @ b.transpose(1, 2), seen["q"], seen["k"], weights)
    qkv = torch.stack([query, key, value]).permute(2, 0, 1, 3).reshape(tokens, -1)
    branch = linear(seen["normed"], block["attn.qkv.weight"], qkv)
    return cloned(seen["x"], [kept, branch]), weights
