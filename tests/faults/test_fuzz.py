"""Readers of files against damage and malice: whatever the bytes are, the answer is a UserError or a result.

Bytes of good files are changed at random; where a checksum would stop that at the gate it is made anew, as somebody
who means harm would. The cases are drawn the same every time; `make faults` draws more of them.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings

from alltokens.core.label_maps import LabelMap
from alltokens.data.sources import open_source
from alltokens.engine import checkpoint
from alltokens.engine.config import RunConfig
from alltokens.engine.loading import to_mapping
from alltokens.engine.recipes import load_recipe, packaged_recipes
from alltokens.errors import UserError
from alltokens.labels import formats
from alltokens.labels.manifest import Description, read_manifest
from alltokens.labels.store import LabelStore, verify_store
from alltokens.labels.writer import LabelWriter
from alltokens.models.weights import read_weights
from tests.faults import hostile

CASES = [pytest.param(40, id="few"), pytest.param(2000, id="many", marks=pytest.mark.faults)]

words = st.text(max_size=8) | st.sampled_from([*to_mapping(RunConfig()), "name", "extends"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | words | st.sampled_from([-1, 2**31, 2**63, 2**64])
values = st.recursive(plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=6)


@st.composite
def damage(draw: Callable[..., Any]) -> Callable[[bytes], bytes]:
    """A few changes of some bytes: other ones, a number as harmful as can be, a cut, a repetition."""
    changes = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["set", "number", "cut", "repeat", "insert"]),
                st.floats(0, 1),
                st.integers(0, 40),
                st.binary(min_size=1, max_size=8),
                st.sampled_from([0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def apply(data: bytes) -> bytes:
        for kind, where, length, other, number in changes:
            # Half of the places lie in the first 80 bytes, where headers are.
            at = int(min(len(data), 80) * 2 * where) if where < 0.5 else int(len(data) * (2 * where - 1))
            if kind == "set":
                data = data[:at] + other + data[at + len(other) :]
            elif kind == "number":
                data = data[:at] + number.to_bytes(8, "little") + data[at + 8 :]
            elif kind == "cut":
                data = data[:at]
            elif kind == "repeat":
                data = data[:at] + data[at : at + length] * 2 + data[at + length :]
            else:
                data = data[:at] + other + data[at:]
        return data

    return apply


def fuzz(cases: int, tally: Any, what: str, strategy: Any, attempt: Callable[[Any], object]) -> None:
    """Nothing but a UserError of one line may come out of `attempt`."""

    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Any) -> None:
        tally[what] += 1
        message = ""
        try:
            attempt(case)
        except UserError as error:
            message = str(error)
        assert "\n" not in message, message

    one()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A small store of two shards and its files' bytes."""
    path = tmp_path_factory.mktemp("good") / "store"
    drawn = torch.Generator().manual_seed(0)
    with LabelWriter(path, Description((3, 3), 2, 10, class_names=tuple("abcdefghij")), shard_size=4) as writer:
        scores = torch.randn(7, 2, 3, 3, generator=drawn).sort(1, descending=True).values.half()
        ids = torch.randint(0, 10, (7, 2, 3, 3), generator=drawn, dtype=torch.int32)
        writer.append([f"cat/{n}.png" for n in range(7)], LabelMap(ids, scores, scores[:, 1]))
        writer.finish()
    return {file.name: file.read_bytes() for file in path.iterdir()}


def placed(files: dict[str, bytes], store: Path) -> None:
    store.mkdir(exist_ok=True)
    for name, content in files.items():
        (store / name).write_bytes(content)


def signed_manifest(content: dict[str, Any]) -> bytes:
    """A manifest that states its own checksum, as the writer spells it."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    text = (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
    return (
        json.dumps(content | {"sha256": hashlib.sha256(text).hexdigest()}, indent=1, sort_keys=True) + "\n"
    ).encode()


def use(store: Path) -> None:
    """Everything that training does with a store, and more."""
    opened = LabelStore.open(store)
    keys = list(opened.keys())[:20]
    opened.read(keys[:5])
    opened["cat/3.png"]
    opened.check(keys, num_classes=10)


@pytest.mark.parametrize("cases", CASES)
def test_manifests(good, cases, tmp_path, tally):
    def attempt(apply):
        (tmp_path / "manifest.json").write_bytes(apply(good["manifest.json"]))
        read_manifest(tmp_path / "manifest.json")

    fuzz(cases, tally, "manifests", damage(), attempt)


def test_the_signature_made_here_is_the_writers(good):
    """Otherwise the cases below would all end at the checksum."""
    assert signed_manifest(json.loads(good["manifest.json"])) == good["manifest.json"]


@pytest.mark.parametrize("cases", CASES)
def test_signed_manifests(good, cases, tmp_path, tally):
    content = json.loads(good["manifest.json"])
    changes = st.dictionaries(st.sampled_from([*content, "other"]), values, min_size=1, max_size=3)

    def attempt(changed):
        placed(good | {"manifest.json": signed_manifest(content | changed)}, tmp_path / "s")
        use(tmp_path / "s")

    fuzz(cases, tally, "signed manifests", changes, attempt)


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("which", ["maps-0000-00000.bin", "index.bin"])
def test_signed_shards_and_indices(good, which, cases, tmp_path, tally):
    """The file's own digest, its length and the manifest agree with the damage."""
    content = json.loads(good["manifest.json"])

    def attempt(apply):
        body = apply(good[which][:-32])
        digest = hashlib.sha256(body).digest()
        facts = json.loads(json.dumps(content))
        for record in (*facts["shards"], facts["index"]):
            if record["name"] == which:
                record |= {"bytes": len(body) + 32, "sha256": digest.hex()}
        placed(good | {which: body + digest, "manifest.json": signed_manifest(facts)}, tmp_path / "s")
        verify_store(tmp_path / "s")
        use(tmp_path / "s")

    fuzz(cases, tally, "signed shards and indices", damage(), attempt)


@pytest.mark.parametrize("cases", CASES)
def test_recipes_of_any_values(cases, tmp_path, tally):
    path = tmp_path / "r.yaml"

    def attempt(content):
        path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8", errors="replace")
        load_recipe(path)

    sections = st.dictionaries(words, st.dictionaries(words, values, max_size=3) | values, max_size=3)
    fuzz(cases, tally, "recipes", sections, attempt)


@pytest.mark.parametrize("cases", CASES)
def test_damaged_recipes(cases, tmp_path, tally):
    text = packaged_recipes()["quickstart"].read_bytes()

    def attempt(apply):
        (tmp_path / "r.yaml").write_bytes(apply(text))
        load_recipe(tmp_path / "r.yaml")

    fuzz(cases, tally, "recipes", damage(), attempt)


@pytest.mark.parametrize("cases", CASES)
def test_weights_states_and_label_files(cases, tmp_path, tally):
    files = {}
    torch.save(torch.rand(2, 2, 3, 3).half(), tmp_path / "label.pt")
    torch.save({"model": {"weight": torch.rand(3, 3)}}, tmp_path / "weights.pth")
    checkpoint.write(tmp_path / "state.safetensors", {"net.w": torch.rand(3)}, {"position": {}, "world": 1})
    for name in ("label.pt", "weights.pth", "state.safetensors"):
        files[name] = (tmp_path / name).read_bytes()

    def attempt(case):
        name, apply = case
        path = tmp_path / name
        path.write_bytes(apply(files[name]))
        {"label.pt": formats.read_file, "weights.pth": read_weights}.get(name, checkpoint.read)(path)

    fuzz(cases, tally, "weights, states and label files", st.tuples(st.sampled_from(sorted(files)), damage()), attempt)


@pytest.mark.parametrize("cases", CASES)
def test_tars(cases, tmp_path, tally):
    picture = hostile.encoded(hostile.Image.fromarray(np.zeros((4, 4, 3), np.uint8)))["PNG"]
    names = ("a/0.png", "a/0.cls", "b/1.png", "b/1.json", "in.tar")
    inner = hostile.tar_of([hostile.member("a/2.png", picture)])
    contents = (picture, b"cat", picture, b'{"label": "dog"}', inner)
    whole = hostile.tar_of([hostile.member(name, content) for name, content in zip(names, contents, strict=True)])

    def attempt(apply):
        data = bytearray(apply(whole))
        for start in range(0, len(data) - 511, 512):  # headers state their sum
            header = data[start : start + 512]
            if header[257:262] == b"ustar":
                header[148:156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % (sum(header) % 8**6)
        (tmp_path / "t.tar").write_bytes(bytes(data))
        source = open_source(tmp_path / "t.tar", labelled=False)
        for index in range(len(source)):
            with contextlib.suppress(OSError):
                assert len(source.read(index)) <= len(data)

    fuzz(cases, tally, "tars", damage(), attempt)
