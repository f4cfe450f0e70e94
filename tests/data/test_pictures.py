from __future__ import annotations

import io
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from alltokens.data.pictures import UnreadablePicture, decode_picture, is_picture_name


def encode(picture: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def pixels(encoded: bytes) -> np.ndarray:
    picture = decode_picture(encoded)
    assert picture.mode == "RGB"
    return np.asarray(picture)


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_rgb_comes_back_to_the_bit(noise: np.ndarray, form: str) -> None:
    assert np.array_equal(pixels(encode(Image.fromarray(noise), form)), noise)


def test_lossless_webp_comes_back_to_the_bit(noise: np.ndarray) -> None:
    assert np.array_equal(pixels(encode(Image.fromarray(noise), "WEBP", lossless=True)), noise)


def test_a_plain_jpeg_decodes_as_timm_decodes_it(noise: np.ndarray) -> None:
    encoded = encode(Image.fromarray(noise), "JPEG", quality=90)
    assert np.array_equal(pixels(encoded), np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB")))


def test_grey_fills_all_channels() -> None:
    grey = np.array([[0, 100, 255]], dtype=np.uint8)
    assert np.array_equal(pixels(encode(Image.fromarray(grey), "PNG")), np.repeat(grey[..., None], 3, 2))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_clipped(form: str) -> None:
    grey = np.array([[0, 257, 128 * 257, 65535 - 257, 65535]], dtype=np.uint16)
    assert pixels(encode(Image.fromarray(grey), form))[0, :, 1].tolist() == [0, 1, 128, 254, 255]


def test_integers_beyond_sixteen_bits_and_floats_are_refused() -> None:
    wide = Image.fromarray(np.array([[0, 70000]], dtype=np.int32))
    with pytest.raises(UnreadablePicture, match=r"a\.tif: values from 0 to 70000"):
        decode_picture(encode(wide, "TIFF"), name="a.tif")
    with pytest.raises(UnreadablePicture, match="floating-point"):
        decode_picture(encode(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF"))


def test_a_palette_gives_its_colours() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 200, 100, 50])
    picture.putdata([0, 1])
    assert pixels(encode(picture, "PNG")).tolist() == [[[10, 20, 30], [200, 100, 50]]]


def test_a_transparent_palette_entry_becomes_white() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 200, 100, 50])
    picture.putdata([0, 1])
    assert pixels(encode(picture, "PNG", transparency=0)).tolist() == [[[255, 255, 255], [200, 100, 50]]]


def test_alpha_is_laid_on_white() -> None:
    rgba = np.array([[[0, 0, 0, 0], [0, 0, 0, 255], [0, 0, 0, 51], [9, 8, 7, 255]]], dtype=np.uint8)
    assert pixels(encode(Image.fromarray(rgba), "PNG"))[0].tolist() == [[255] * 3, [0] * 3, [204] * 3, [9, 8, 7]]


def test_grey_with_alpha_is_laid_on_white() -> None:
    assert pixels(encode(Image.new("LA", (1, 1), (40, 0)), "PNG")).tolist() == [[[255] * 3]]


@pytest.mark.parametrize(("ink", "colour"), [((0, 0, 0, 0), 255), ((0, 0, 0, 255), 0)])
def test_cmyk_becomes_rgb(ink: tuple[int, ...], colour: int) -> None:
    assert np.abs(pixels(encode(Image.new("CMYK", (8, 8), ink), "JPEG")).astype(int) - colour).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_exif_orientation_turns_the_pixels_upright(orientation: int, form: str) -> None:
    upright = np.zeros((16, 32), dtype=np.uint8)
    upright[:8, :16] = 255  # the bright corner is at the top left
    # How the camera stored it: the inverse of what the tag asks the viewer to do.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = pixels(encode(Image.fromarray(np.ascontiguousarray(stored)), form, exif=exif))[..., 0]
    assert decoded.shape == upright.shape
    assert np.abs(decoded.astype(int) - upright).max() <= 4


def test_sixteen_bits_turn_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    grey = np.array([[0, 65535]], dtype=np.uint16)
    assert pixels(encode(Image.fromarray(grey), "PNG", exif=exif))[0, :, 0].tolist() == [255, 0]


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_an_animation_gives_its_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("black", "white")]
    encoded = encode(frames[0], form, save_all=True, append_images=frames[1:])
    assert pixels(encoded).max() == 0


def test_a_single_pixel_is_a_picture() -> None:
    assert pixels(encode(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG")).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize(("max_pixels", "size"), [(64 * 48, (64, 48)), (3000, (32, 24)), (400, (16, 12)), (50, (8, 6))])
def test_a_large_jpeg_is_decoded_smaller(max_pixels: int, size: tuple[int, int]) -> None:
    encoded = encode(Image.new("RGB", (64, 48), (200, 100, 50)), "JPEG")
    picture = decode_picture(encoded, max_pixels=max_pixels)
    assert picture.size == size
    assert np.abs(np.asarray(picture).astype(int) - (200, 100, 50)).max() <= 3


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_picture_beyond_max_pixels_is_named_with_its_size_and_the_setting(form: str) -> None:
    encoded = encode(Image.new("RGB", (64, 48)), form)
    with pytest.raises(UnreadablePicture, match=r"cat/1\.x: \d+x\d+ pixels .*data\.max_pixels=10"):
        decode_picture(encoded, max_pixels=10, name="cat/1.x")


@pytest.mark.parametrize("size", [(10_000, 9_500), (20_000, 10_000)])
def test_a_bomb_is_an_error_before_it_is_decoded_and_without_a_warning(size: tuple[int, int]) -> None:
    header = bytearray(encode(Image.new("L", (1, 1)), "PNG"))
    header[16:24] = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big")
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            UnreadablePicture, match=rf"bomb\.png: .*({size[0] * size[1]:,}|{size[0]}x{size[1]}) pixels"
        ):
            decode_picture(bytes(header), name="bomb.png")


@pytest.mark.parametrize(
    ("encoded", "cause"),
    [
        (b"", "the file is empty"),
        (b"<html>not found</html>", "of no known format"),
        (b"\xff\xd8\xff\xe0 broken", "not a readable picture"),
        (encode(Image.effect_noise((64, 64), 50), "JPEG")[:-400], "truncated"),
        (encode(Image.effect_noise((64, 64), 50), "PNG")[:-400], "truncated"),
    ],
)
def test_an_unreadable_picture_is_named_with_the_cause(encoded: bytes, cause: str) -> None:
    with pytest.raises(UnreadablePicture, match=f"dog/7.jpg: .*{cause}"):
        decode_picture(encoded, name="dog/7.jpg")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("a/b.JPEG", True), ("b.webp", True), ("a/._b.jpg", False), ("b.txt", False), ("jpg", False)],
)
def test_pictures_are_known_by_their_extension(name: str, is_one: bool) -> None:
    assert is_picture_name(name) is is_one
