"""From the classes that an annotator knows to the classes that the labels count.

Shapes: B batch, K classes of the annotator, L classes of the labels, M of the first for one of the second at most, h
and w places.

A data set's class is one class of the annotator, or several, whose probabilities are added. What no class of the data
set maps to is left out of the labels, and out of their tail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

from alltokens.errors import UserError, unknown

_WORDNET_ID = re.compile(r"n\d{8}(?!\d)")
_NUMBERING = re.compile(r"^\d+[\s._-]+")  # "012.binoculars"


@dataclass(frozen=True)
class ClassMap:
    """For each class of the labels, which classes of the annotator it is. `names` may be missing."""

    members: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()
    own: bool = False  # whether these are the annotator's classes as they are

    def __len__(self) -> int:
        return len(self.members)

    def merging(self) -> nn.Module:
        """(B, K, h, w) raw scores -> (B, L, h, w)."""
        return nn.Identity() if self.own else _Merging(self.members)

    def __str__(self) -> str:
        if self.own:
            return "own"
        return ", ".join(
            f"{name}={'+'.join(map(str, ids))}" for name, ids in zip(self.names, self.members, strict=True)
        )


class _Merging(nn.Module):
    index: Tensor
    absent: Tensor

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        super().__init__()
        most = max(map(len, members))
        index = torch.tensor([[*ids, *[ids[0]] * (most - len(ids))] for ids in members])  # (L, M)
        absent = torch.tensor([[at >= len(ids) for at in range(most)] for ids in members])
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("absent", absent[:, :, None, None], persistent=False)

    def forward(self, scores: Tensor) -> Tensor:
        if self.index.shape[1] == 1:
            return scores[:, self.index[:, 0]]
        return scores[:, self.index].masked_fill(self.absent, -torch.inf).logsumexp(2)  # of (B, L, M, h, w)


@dataclass(frozen=True)
class AnnotatorClasses:
    """How many classes an annotator has, what they are called, and by which words each is found."""

    count: int
    names: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, ...], ...] = ()  # of each class, the usual one first

    @classmethod
    def of(cls, model: nn.Module, names: Sequence[str] | None = None) -> AnnotatorClasses:
        """What the model says, or WordNet's ids and English words where it has as many classes as a set of ImageNet."""
        count = int(model.num_classes)  # type: ignore[arg-type]
        described: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
        names = tuple(names or described.get("label_names") or ())
        if names and len(names) != count:
            raise UserError(f"{len(names)} class names for an annotator of {count} classes")
        subset = infer_imagenet_subset(model)
        if names or subset is None:
            return cls(count, names, ((),) * count)
        return cls._of_imagenet(subset)

    @classmethod
    def called(cls, names: Sequence[str]) -> AnnotatorClasses:
        """Classes of these names; if those are the WordNet ids of a set of ImageNet, its English words too."""
        names = tuple(names)
        subset = infer_imagenet_subset({"num_classes": len(names)})
        found = None if subset is None else cls._of_imagenet(subset)
        return found if found is not None and found.names == names else cls(len(names), names, ((),) * len(names))

    @classmethod
    def _of_imagenet(cls, subset: str) -> AnnotatorClasses:
        info = ImageNetInfo(subset)
        synonyms = tuple(
            tuple(word.strip() for word in words.split(",")) for words in map(str, info.label_descriptions())
        )
        return cls(len(synonyms), tuple(info.label_names()), synonyms)

    @property
    def words(self) -> tuple[str, ...]:
        """What people call the classes."""
        return tuple(words[0] if words else name for name, words in zip(self.names, self.synonyms, strict=True))

    def find(self, name: str) -> list[int]:
        """The classes that are called so; only those of the best kind of match."""
        plain, bare = _plain(name), _plain(_NUMBERING.sub("", name))
        tries = [(0, name), *((0, found) for found in _WORDNET_ID.findall(name))]
        tries += [(1, plain), (2, plain), (3, plain), (1, bare), (3, bare)]
        return next((found for table, words in tries if (found := self._tables[table].get(words))), [])

    @cached_property
    def _tables(self) -> tuple[dict[str, list[int]], ...]:
        """What is written -> classes: exact names, names, usual English words, all English words."""
        exact: dict[str, list[int]] = {}
        named: dict[str, list[int]] = {}
        usual: dict[str, list[int]] = {}
        spoken: dict[str, list[int]] = {}
        for at, (name, words) in enumerate(zip(self.names, self.synonyms, strict=bool(self.names))):
            exact.setdefault(name, []).append(at)
            named.setdefault(_plain(name), []).append(at)
            for word in dict.fromkeys(map(_plain, words)):
                spoken.setdefault(word, []).append(at)
            if words:
                usual.setdefault(_plain(words[0]), []).append(at)
        return exact, named, usual, spoken

    def describe(self, at: int) -> str:
        words = self.synonyms[at] if self.synonyms else ()
        return f"{at} {self.names[at]}{f' ({words[0]})' if words else ''}" if self.names else str(at)


def own_classes(annotator: AnnotatorClasses) -> ClassMap:
    """The labels count the annotator's own classes."""
    return ClassMap(tuple((at,) for at in range(annotator.count)), annotator.names, own=True)


def match_classes(class_names: Sequence[str], annotator: AnnotatorClasses) -> ClassMap:
    """Each class by its name: the annotator's own name, a WordNet id in it ("n01440764_tench"), or English words."""
    if tuple(class_names) == annotator.names:
        return own_classes(annotator)
    if not annotator.names:
        raise UserError(
            f"the annotator's {annotator.count} classes have no names to match the folders' by; write down which is "
            "which in a file (--class-map FILE), or keep the annotator's own (--class-map own)"
        )
    members: list[tuple[int, ...]] = []
    missing: list[str] = []
    for name in class_names:
        found = annotator.find(name)
        if len(found) > 1:
            several = ", ".join(map(annotator.describe, found))
            raise UserError(
                f"the class {name!r} may be several of the annotator's: {several}; say in a file which (--class-map "
                f"FILE), as {name}: {annotator.names[found[0]]}"
            )
        members.append(tuple(found))
        if not found:
            missing.append(name)
    if missing:
        raise UserError(
            f"the annotator knows no class called {', '.join(map(repr, missing[:5]))}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}, of the {len(class_names)} classes of the "
            "pictures. Write down which of its classes each is (--class-map FILE), keep the annotator's own classes "
            "(--class-map own), or train an annotator on these pictures first"
        )
    return _checked(members, class_names, annotator)


def spelled_out(spelled: Mapping[str, Any], annotator: AnnotatorClasses, class_names: Sequence[str] = ()) -> ClassMap:
    """A mapping that a user wrote: class of the pictures -> one or several of the annotator's, by number or name.

    Without `class_names` the mapping's own order counts.
    """
    names = tuple(class_names) or tuple(map(str, spelled))
    for name in spelled:
        if name not in names:
            raise unknown("class in the class map", name, names)
    if missing := [name for name in names if name not in spelled]:
        raise UserError(
            f"the class map says nothing of {', '.join(map(repr, missing[:5]))}; every class needs an entry"
        )
    return _checked([_numbers(name, spelled[name], annotator) for name in names], names, annotator)


def _numbers(name: str, value: Any, annotator: AnnotatorClasses) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    found: list[int] = []
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int | str):
            raise UserError(
                f"class map: {name}: expected a number or a name of a class, or a list of them, got {one!r}"
            )
        if isinstance(one, int):
            if not 0 <= one < annotator.count:
                raise UserError(f"class map: {name}: the annotator's classes are 0 to {annotator.count - 1}, got {one}")
            found.append(one)
            continue
        matches = annotator.find(one)
        if len(matches) != 1:
            several = ", ".join(map(annotator.describe, matches))
            raise UserError(
                f"class map: {name}: {one!r} is "
                + (f"several of the annotator's classes: {several}; give its number" if matches else "no class of it")
            )
        found += matches
    if not found or len(set(found)) < len(found):
        raise UserError(f"class map: {name}: one class at least, and none twice; got {value!r}")
    return tuple(found)


def _checked(members: Sequence[tuple[int, ...]], names: Sequence[str], annotator: AnnotatorClasses) -> ClassMap:
    owner: dict[int, str] = {}
    for name, ids in zip(names, members, strict=True):
        for at in ids:
            if at in owner:
                raise UserError(
                    f"{owner[at]!r} and {name!r} would both be the annotator's class {annotator.describe(at)}; "
                    "a label map cannot tell them apart"
                )
            owner[at] = name
    return ClassMap(tuple(members), tuple(names))


def _plain(words: str) -> str:
    return " ".join(re.split(r"[\s_-]+", words.casefold().strip()))


def resolve_class_map(
    wanted: str | Mapping[str, Any] | None, annotator: AnnotatorClasses, class_names: Iterable[str]
) -> ClassMap:
    """`auto` by names, `own` for the annotator's classes, or a mapping; None is auto where pictures have classes."""
    names = tuple(class_names)
    if isinstance(wanted, Mapping):
        return spelled_out(wanted, annotator, names)
    if wanted not in (None, "auto", "own"):
        raise unknown("class map", wanted, ("auto", "own"), hint="Or a mapping from class names to the annotator's.")
    if wanted == "auto" and not names:
        raise UserError("class map auto matches class folders by name, but these pictures have no classes; use own")
    return own_classes(annotator) if wanted == "own" or not names else match_classes(names, annotator)
