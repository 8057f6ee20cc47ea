"""Decoding of image files of every kind."""

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_lab.data.images import ImageError, decode, to_tensor

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def picture(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(PIXELS).convert(mode)


def as_array(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("file", ["a.png", "a.webp", "named_wrongly.jpg"])
def test_lossless_files_are_decoded_exactly(tmp_path, file):
    path = tmp_path / file
    picture().save(path, format="WEBP" if file == "a.webp" else "PNG", lossless=True)
    image = to_tensor(decode(path), 3)
    assert (image.dtype, image.shape) == (torch.uint8, (3, 20, 30))
    assert np.array_equal(as_array(image), PIXELS)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_modes_are_converted_as_pillow_does(tmp_path, recwarn, mode, channels):
    picture(mode).save(
        tmp_path / "a.png", **({"transparency": bytes(range(256))} if mode == "P" else {})
    )
    expected = np.array(picture(mode).convert("RGB" if channels == 3 else "L")).reshape(
        20, 30, channels
    )
    assert np.array_equal(as_array(to_tensor(decode(tmp_path / "a.png"), channels)), expected)
    assert not recwarn.list


def test_cmyk_jpeg_and_16_bit_grey_are_converted(tmp_path):
    Image.new("RGB", (16, 16), (200, 30, 60)).convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    assert to_tensor(decode(tmp_path / "a.jpg"), 3).float().mean(
        dim=(1, 2)
    ).tolist() == pytest.approx([200, 30, 60], abs=4)
    values = np.arange(0, 65536, 128, dtype=np.uint16).reshape(16, 32)
    Image.fromarray(values).save(tmp_path / "a.png")
    for channels in (1, 3):
        image = to_tensor(decode(tmp_path / "a.png"), channels)
        assert len(image) == channels
        assert all(np.array_equal(channel, values >> 8) for channel in image.numpy()), (
            "the upper 8 bits count"
        )


@pytest.mark.parametrize(
    ("orientation", "turned"), [(1, PIXELS), (3, PIXELS[::-1, ::-1]), (6, np.rot90(PIXELS, -1))]
)
def test_exif_orientation_is_applied(tmp_path, orientation, turned):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(as_array(to_tensor(decode(tmp_path / "a.png"), 3)), turned)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("JPEG", ".+"),
        ("PNG", ".+"),
        ("WEBP", ".+"),
        (b"", "not a JPEG"),
        (b"GIF89a", "not a JPEG"),
        (None, ".*No such file"),
    ],
)
def test_truncated_file_or_file_that_is_no_image_is_named(tmp_path, content, reason):
    path = tmp_path / "a.jpg"
    if isinstance(content, str):
        picture().resize((300, 200)).save(path, format=content)
        content = path.read_bytes()[: path.stat().st_size // 2]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImageError, match=rf"{path}: cannot be decoded \({reason}"):
        decode(path)
