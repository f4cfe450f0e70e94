from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from alltokens.data.picture_source import PictureSource
from alltokens.data.sources import open_source
from tests.data.samples import COUNT


@pytest.fixture(params=["folder", "tar"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> PictureSource:
    rng = np.random.default_rng(0)
    with tarfile.open(tmp_path / "all.tar", "w") as file:
        for index in range(COUNT):
            path = tmp_path / "folder" / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(exist_ok=True, parents=True)
            Image.fromarray(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)).save(path)
            file.add(path, path.relative_to(tmp_path / "folder"))
    return open_source(tmp_path / ("folder" if request.param == "folder" else "all.tar"))
