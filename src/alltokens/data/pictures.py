"""One encoded picture -> an upright RGB picture of 8 bits.

Shapes: pictures are PIL; w and h are their width and height in pixels.

What a viewer would show is what the network gets: EXIF orientation is applied, transparency is laid on white (the
colours below transparent pixels are arbitrary, often black), 16-bit grey is scaled rather than clipped, an animation
gives its first frame. timm and torchvision call `convert("RGB")` alone, which ignores the orientation, drops alpha and
clips 16 bits; for plain 8-bit pictures without an orientation the result is the same to the bit.
"""

from __future__ import annotations

import io
import struct
from contextlib import suppress

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, WebPImagePlugin  # noqa: F401  # pyright: ignore[reportUnusedImport]
from PIL.JpegImagePlugin import JpegImageFile

from alltokens.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

# Of Pillow's decoders those for the extensions above, whatever a file is called: some of the others start programs
# (EPS starts Ghostscript), and many are seldom looked after.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")

MAX_PIXELS = 89_478_485  # where Pillow starts to warn of decompression bombs: 256 MiB of RGB

Image.preinit()  # with the two plugins above, all of these are there

_JPEG_SIGNATURE = b"\xff\xd8\xff"


class UnreadablePicture(UserError):
    """A picture that cannot be decoded, or is too large; the message names it and the cause."""


def is_picture_name(name: str) -> bool:
    """Whether a file is taken for a picture: a known extension in any case, and not hidden."""
    return name.lower().endswith(EXTENSIONS) and not name.rpartition("/")[2].startswith(".")


def decode_picture(
    encoded: bytes | Image.Image, *, max_pixels: int = MAX_PIXELS, enough: int | None = None, name: str = "picture"
) -> Image.Image:
    """The bytes of a picture file -> RGB; a PIL picture is converted only. `name` is what an error calls it.

    A JPEG of more than `max_pixels` is decoded at a half, a quarter or an eighth of its size, which costs less than
    the whole; any other such picture is an UnreadablePicture, found from the header before anything is decoded.
    Where sides of `enough` pixels are enough, a JPEG is decoded as small as leaves them.
    """
    try:
        return _rgb(_upright(_opened(encoded, max_pixels, enough)))
    except UnreadablePicture as error:
        raise UnreadablePicture(f"{name}: {error}") from None
    except Exception as error:  # Pillow's decoders raise nearly anything for a broken file
        raise UnreadablePicture(f"{name}: not a readable picture ({_cause(encoded, error)})") from error


def _opened(encoded: bytes | Image.Image, max_pixels: int, enough: int | None) -> Image.Image:
    if isinstance(encoded, Image.Image):
        return encoded
    if encoded.startswith(_JPEG_SIGNATURE):
        # Not through Image.open: that refuses huge sizes before a draft could make them small.
        jpeg = JpegImageFile(io.BytesIO(encoded))
        width, height = jpeg.size
        shrink = next((s for s in (1, 2, 4, 8) if -(-width // s) * -(-height // s) <= max_pixels), 8)
        if enough is not None:
            shrink = max(shrink, next((s for s in (8, 4, 2) if min(width, height) // s >= enough), 1))
        if shrink > 1:
            jpeg.draft(None, (max(1, width // shrink), max(1, height // shrink)))
        return _checked(jpeg, max_pixels)
    return _checked(_recognised(encoded), max_pixels)


def _recognised(encoded: bytes) -> Image.Image:
    """Image.open, without its own opinion of what is too large: a warning, which cannot be held back by thread."""
    for name in _FORMATS:
        factory, accepts = Image.OPEN[name]
        with suppress(SyntaxError, IndexError, TypeError, struct.error):  # with these a format says: not mine
            if accepts is None or accepts(encoded[:16]) is True:
                return factory(io.BytesIO(encoded), "")
    raise Image.UnidentifiedImageError


def _checked(picture: Image.Image, max_pixels: int) -> Image.Image:
    if picture.width * picture.height > max_pixels:
        raise UnreadablePicture(
            f"{picture.width}x{picture.height} pixels are more than data.max_pixels={max_pixels:,}; "
            f"make the picture smaller or raise data.max_pixels"
        )
    return picture


def _upright(picture: Image.Image) -> Image.Image:
    picture.load()
    try:
        orientation = picture.getexif().get(0x0112, 1)
    except Exception:  # a broken EXIF block says nothing; the pixels are fine
        return picture
    return ImageOps.exif_transpose(picture) if orientation in range(2, 9) else picture


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UnreadablePicture(f"values from {values.min()} to {values.max()} do not fit 8 or 16 bits; convert it")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")  # 65535 / 257 = 255
    if picture.mode == "F":
        raise UnreadablePicture("floating-point pixels have no stated range; save it with 8 or 16 bits per channel")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return picture.convert("RGB")


def _cause(encoded: bytes | Image.Image, error: Exception) -> str:
    if isinstance(encoded, bytes) and not encoded:
        return "the file is empty"
    if isinstance(error, Image.UnidentifiedImageError):
        return "of no known format"
    return str(error) or type(error).__name__
