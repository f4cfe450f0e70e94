"""Files made to harm: what they would do if they were trusted is said by a canary, a file that must never appear."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save


class Canary:
    """Unpickled by whoever trusts pickles, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def weights_files(canary: Path) -> dict[str, bytes]:
    """File name -> content; not one of them may be read as weights."""
    tensor = torch.zeros(4)
    inside: dict[str, Any] = {"weight": tensor}
    inside["model"] = inside
    return {
        "code.pth": _saved({"weight": Canary(canary)}),
        "code-in-a-state-dict.pth": _saved({"model": {"weight": tensor}, "args": Canary(canary)}),
        "bare-pickle.pth": pickle.dumps(Canary(canary)),
        "pickle-as.safetensors": pickle.dumps(Canary(canary)),
        "a-module.pth": _saved(torch.nn.Linear(2, 2)),
        "compressed.pth": _compressed(_saved({"weight": torch.zeros(4_000_000)})),
        "repeated.pth": _saved({"weight": torch.zeros(1).expand(1 << 20, 1 << 20)}),
        "inside-itself.pth": _saved(inside),
        "no-tensors.pth": _saved({"weight": "abc"}),
        "a-list.pth": _saved([tensor]),
        "empty.pth": b"",
        "cut-off.pth": _saved({"weight": tensor})[:-200],
        "empty.safetensors": b"",
        "cut-off.safetensors": save({"weight": tensor})[:-8],
        "header-beyond.safetensors": struct.pack("<Q", 1 << 62) + b"{}",
        "header-no-json.safetensors": struct.pack("<Q", 4) + b"[[[[" + bytes(16),
        "offsets-beyond.safetensors": _safetensors('{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,1073741824]}}'),
        "shape-beyond.safetensors": _safetensors(
            '{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}'
        ),
    }


YAML_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


def yaml_texts(canary: Path) -> dict[str, bytes]:
    return {
        "code": f"model: !!python/object/apply:os.system ['touch {canary}']".encode(),
        "code, new": f"model: !!python/object/new:subprocess.Popen [['touch', '{canary}']]".encode(),
        "a class": b"model: !!python/name:os.system",
        "a module": b"x: !!python/module:antigravity",
        "an own tag": b"train: !include /etc/passwd",
        "a bomb": YAML_BOMB.encode(),
        "a bomb of mappings": YAML_BOMB.replace("[", "{k: [").replace("]", "]}").encode(),
        "inside itself": b"model: &a {options: *a}",
        "a list inside itself": b"model: &a [*a]",
        "deep": b"model: " + b"[" * 5_000,
        "deep mappings": b"".join(b" " * n + b"a:\n" for n in range(1000)),
        "a giant number": b"train: {epochs: " + b"9" * 5000 + b"}",
        "no date": b"train: {epochs: 2020-99-99}",
        "no number": b"train: {epochs: 0x}",
        "infinite": b"train: {epochs: .inf}",
        "binary": b"train: {epochs: !!binary '***'}",
        "a merge": b"train: {<<: {epochs: 1}}",
        "a key twice": b"train: {epochs: 1, epochs: 2}",
        "a key that is a list": b"? [a, b]\n: c",
        "zero bytes": b"train: \0",
        "control signs": b"train: \x07\x1b[2J",
        "not UTF-8": b"train: {device: \xff\xfe}",
        "UTF-16": "train: {epochs: 1}".encode("utf-16"),
        "two documents": b"train: {}\n---\nmodel: {}",
        "a list": b"- train",
        "a word": b"train",
        "no YAML": b"train: {epochs: 1",
        "tabs": b"train:\n\tepochs: 1",
        "too large": b"# " + b"x" * 10_000_001,
    }


def pictures() -> dict[str, bytes]:
    """Name -> bytes that are no readable picture of allowed size."""
    good = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)))
    large = 60_000
    return {
        "empty": b"",
        "one byte": b"\x89",
        "text": b"<html>not here</html>",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script></svg>',
        "EPS, which would start Ghostscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n" + bytes(64),
        "PDF": b"%PDF-1.4\n%%EOF",
        **{f"cut off, {kind}": data[: len(data) // 3] for kind, data in good.items()},
        **{f"header alone, {kind}": data[:24] for kind, data in good.items()},
        "PNG bomb": _png(large, large, b""),
        "PNG bomb in one row": _png(2**31 - 1, 1, b""),
        "PNG bomb with its zeros": _png(20_000, 20_000, zlib.compress(bytes(20_001 * 2000), 9)),
        "PNG of no size": _png(0, 0, b""),
        "PNG text bomb": _png(8, 8, b"", _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80_000_000), 9))),
        "PNG profile bomb": _png(8, 8, b"", _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(80_000_000), 9))),
        "PPM bomb": f"P6 {large} {large} 255\n".encode(),
        "PPM without pixels": b"P6 9000 9000 255\n",
        "PPM of a negative size": b"P6 -5 5 255\n" + bytes(100),
        "GIF bomb": b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\0\0\0",
        "BMP bomb": b"BM" + struct.pack("<IHHIIiiHHIIIIII", 0, 0, 0, 54, 40, large, large, 1, 24, 0, 0, 0, 0, 0, 0),
        "JPEG bomb": _resized_jpeg(good["JPEG"], 65_500, 65_500),
        "TIFF that points beyond": b"II*\0" + struct.pack("<I", 0xFFFFFFF0),
        "floating point": _tiff_of_floats(),
    }


def encoded(picture: Image.Image) -> dict[str, bytes]:
    kinds = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM")
    return {kind: _encoded(picture, kind) for kind in kinds}


def _encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def odd_pictures() -> dict[str, tuple[bytes, tuple[int, int, int]]]:
    """Name -> bytes of a picture that is unusual but good, and the colour that it must show in the middle."""
    red, blue = Image.new("RGB", (9, 7), (255, 0, 0)), Image.new("RGB", (9, 7), (0, 0, 255))
    frames = {"save_all": True, "append_images": [blue], "duration": 10}
    deep = Image.fromarray(np.full((7, 9), 65_535 // 5 * 2, np.uint16))  # 2/5 of white
    clear = Image.new("RGBA", (9, 7), (0, 255, 0, 0))
    palette = red.quantize(4)
    return {
        "animated GIF": (_encoded(red, "GIF", **frames), (255, 0, 0)),
        "animated PNG": (_encoded(red, "PNG", **frames), (255, 0, 0)),
        "animated WebP": (_encoded(red, "WEBP", lossless=True, **frames), (255, 0, 0)),
        "16-bit PNG": (_encoded(deep, "PNG"), (102, 102, 102)),
        "16-bit TIFF": (_encoded(deep, "TIFF"), (102, 102, 102)),
        "palette": (_encoded(palette, "PNG"), (255, 0, 0)),
        "transparent": (_encoded(clear, "PNG"), (255, 255, 255)),
        "CMYK TIFF": (_encoded(red.convert("CMYK"), "TIFF"), (255, 0, 0)),
        "one bit": (_encoded(Image.new("1", (9, 7), 1), "PNG"), (255, 255, 255)),
        "grey": (_encoded(Image.new("L", (9, 7), 77), "BMP"), (77, 77, 77)),
    }


Member = tuple[tarfile.TarInfo, bytes]


def tars(picture: bytes) -> dict[str, bytes]:
    """Name -> a tar that must be refused, or that holds no picture."""
    whole = tar_of([member("cat/0.png", picture), member("dog/1.png", picture)])
    lying = bytearray(whole)
    lying[124:136] = b"77777777777\0"  # the first member's size: 8 GB
    lying[148:156] = b"        "
    lying[148:156] = b"%06o\0 " % sum(lying[:512])
    nested = whole
    for _ in range(40):
        nested = tar_of([member("in.tar", nested)])
    return {
        "empty": b"",
        "text": b"no tar at all" * 100,
        "cut off": whole[:700],
        "a size beyond the end": bytes(lying),
        "compressed": zlib.compress(whole),
        "tars in tars in tars": nested,
        "links alone": tar_of([_link("cat/0.png", "/etc/passwd"), _link("dog/1.png", "../../x", tarfile.LNKTYPE)]),
        "a device": tar_of([_special("cat/0.png", tarfile.CHRTYPE), _special("dog/0.png", tarfile.FIFOTYPE)]),
        "a zip": _zip({"cat/0.png": picture}),
    }


def tar_of(members: list[Member]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, content: bytes) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def traversing_tar(picture: bytes) -> bytes:
    names = ("../cat/0.png", "/tmp/dog/1.png", "cat/../../2.png", "dog/3.png", "C:\\dog/4.png", "cat/./5.png")
    return tar_of([member(name, picture) for name in names])


def _link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def _special(name: str, kind: bytes) -> Member:
    info = tarfile.TarInfo(name)
    info.type = kind
    return info, b""


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _compressed(saved: bytes) -> bytes:
    """The same archive, deflated: 16 MB of zeros in some 20 kB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as before, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as after:
        for entry in before.infolist():
            after.writestr(entry.filename, before.read(entry))
    return buffer.getvalue()


def _safetensors(header: str) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + bytes(16)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, pixels: bytes, extra: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _resized_jpeg(jpeg: bytes, width: int, height: int) -> bytes:
    """The header says another size than the data has."""
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]


def _tiff_of_floats() -> bytes:
    return _encoded(Image.fromarray(np.full((4, 4), 1e30, np.float32)), "TIFF")
