"""Where a model looks: maps over the tokens of pictures, by four methods.

Shapes: B batch, H and W picture, h and w token grid, K classes, P prefix tokens, N = h * w patches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alltokens.errors import UnsupportedModel, UserError, unknown
from alltokens.explain.attribution import attribution, check_attribution
from alltokens.explain.recording import first_row, read_attention, walk, working_copy
from alltokens.follow.families import find_route, followed_model
from alltokens.follow.route import Route
from alltokens.models.token_output import answers_for_tokens

METHODS = {
    "attribution": "relevance times gradient for a class (Chefer et al.)",
    "rollout": "attention and residuals of all layers multiplied (Abnar and Zuidema)",
    "class_attention": "the class token's attention in the last layer, mean over heads",
    "token_heat": "the probability of a class at every token, of models with a dense head",
}
BY_CLASS = ("attribution", "token_heat")  # the others look the same for every class


class Explainer:
    """Maps of one model: `Explainer(model).heat(images, classes, method) -> (B, h, w)`.

    The model is copied once, at the start, and nothing in it is ever touched. dtype: what is computed in; the rules of
    attribution are ill-conditioned, so torch.float64 gives figures that another program can be compared with.
    `methods` are those that are defined for this model, `reasons` says of the others why they are not.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.net = working_copy(model, dtype)
        self.reasons: dict[str, str] = {}
        self._dense = answers_for_tokens(self.net)
        self._inner: nn.Module | None = None
        self._route: Route | None = None
        try:
            self._inner = followed_model(self.net)
            self._route = find_route(self._inner, "tl_align")
        except UserError as error:
            self.reasons |= dict.fromkeys(("attribution", "rollout", "class_attention"), str(error))
        for method in METHODS:
            try:
                self._check(method)
            except UserError as error:
                self.reasons[method] = str(error)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(method for method in METHODS if method not in self.reasons)

    def probabilities(self, images: Tensor) -> Tensor:
        """(B, K): the model's own answer, by the read-out that it is set to."""
        with torch.no_grad():
            return self.net(self._like(images)).softmax(-1)

    def heat(self, images: Tensor, classes: Tensor | None = None, method: str = "attribution") -> Tensor:
        """(B, h, w): one map for each picture (B, 3, H, W), for its class (B,) where the method tells classes apart."""
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if method in self.reasons:
            defined = f"Defined for this model: {', '.join(self.methods)}." if self.methods else "No method is."
            raise UnsupportedModel(
                f"{method} is not defined for this model: {self.reasons[method].rstrip('.')}. {defined}"
            )
        images = self._like(images)
        if method not in BY_CLASS:
            return self._rollout(images) if method == "rollout" else self._class_attention(images)
        if classes is None or classes.shape != (len(images),):
            came = "none" if classes is None else tuple(classes.shape)
            raise UserError(f"{method} wants a class for each of the {len(images)} pictures, got {came}")
        count = getattr(self.net, "num_classes", None)
        if isinstance(count, int) and not 0 <= int(classes.min()) <= int(classes.max()) < count:
            raise UserError(f"this model tells {count} classes apart, counted from 0; got {classes.tolist()}")
        classes = classes.to(images.device)
        return self._attribution(images, classes) if method == "attribution" else self._token_heat(images, classes)

    def _attribution(self, images: Tensor, classes: Tensor) -> Tensor:
        followed, route = self._followable()
        model: Any = followed
        readout = getattr(model, "readout", None)
        if readout is not None:  # the class token's own logit, as published: the dense head takes no part
            model.readout = "class"
        try:
            return self._patches(attribution(model, route, images, classes), images)
        finally:
            if readout is not None:
                model.readout = readout

    def _rollout(self, images: Tensor) -> Tensor:
        """How much of each token at the input is in what is classified: the transport of shares, read backwards."""
        model, route = self._followable()
        attention = read_attention(model, route, images)
        with torch.inference_mode(False), torch.enable_grad():
            row = first_row(route, images).requires_grad_()
            classified = route.classified(walk(route, row, attention)).sum()
            (parts,) = torch.autograd.grad(classified, row)
        return self._patches(parts, images)

    def _class_attention(self, images: Tensor) -> Tensor:
        model, route = self._followable()
        assert route.class_attention is not None
        weights = read_attention(model, route, images)[route.class_attention]  # (B, H, T, S)
        grid = route.class_grid(_size(images))
        return weights[:, :, 0, -grid[0] * grid[1] :].mean(1).reshape(-1, *grid)

    def _token_heat(self, images: Tensor, classes: Tensor) -> Tensor:
        net: Any = self.net
        with torch.no_grad():
            tokens = net(images, tokens=True).token_logits.softmax(-1)  # (B, N, K)
        wanted = tokens.gather(2, classes[:, None, None].expand(-1, tokens.shape[1], 1))
        return wanted.reshape(-1, *token_grid_of(net, _size(images)))

    def _patches(self, parts: Tensor, images: Tensor) -> Tensor:
        _, route = self._followable()
        return route.patches(parts).reshape(-1, *route.grid(_size(images)))

    def _followable(self) -> tuple[nn.Module, Route]:
        assert self._inner is not None and self._route is not None, "checked at the start"
        return self._inner, self._route

    def _check(self, method: str) -> None:
        """Raise a UserError if the method is not defined for this model."""
        if method == "token_heat":
            if not self._dense:
                raise UnsupportedModel("it has no dense head (LV-ViT built with dense=True, or a TokenClassifier)")
        elif method not in self.reasons:
            check = _CHECKS.get(method)
            if check is not None:
                check(*self._followable())

    def _like(self, images: Tensor) -> Tensor:
        parameter = next(self.net.parameters())
        return images.detach().to(parameter.device, parameter.dtype)


def _check_class_attention(model: nn.Module, route: Route) -> None:
    if route.class_attention is None:
        raise UnsupportedModel(f"this {type(model).__name__} has no class token that is classified")


_CHECKS: dict[str, Callable[[nn.Module, Route], None]] = {
    "attribution": check_attribution,
    "class_attention": _check_class_attention,
}


def token_grid_of(net: Any, image_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the tokens that a dense head classifies."""
    rows, columns = (getattr(net, "token_grid", None) or net.patch_embed.dynamic_feat_size)(image_size)
    return int(rows), int(columns)


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]
