"""Decoding of image files of every kind, and the view of an image for evaluation."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from ddp_lab.data.images import ImageError, decode, evaluation_view, resize

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def picture(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(PIXELS).convert(mode)


def as_array(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("file", ["a.png", "a.webp", "named_wrongly.jpg"])
def test_lossless_files_are_decoded_exactly(tmp_path, file):
    path = tmp_path / file
    picture().save(path, format="WEBP" if file == "a.webp" else "PNG", lossless=True)
    image = decode(path, 3)
    assert (image.dtype, image.shape) == (torch.uint8, (3, 20, 30))
    assert np.array_equal(as_array(image), PIXELS)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_modes_are_converted_as_pillow_does(tmp_path, recwarn, mode, channels):
    picture(mode).save(tmp_path / "a.png", **({"transparency": bytes(range(256))} if mode == "P" else {}))
    expected = np.array(picture(mode).convert("RGB" if channels == 3 else "L")).reshape(20, 30, channels)
    assert np.array_equal(as_array(decode(tmp_path / "a.png", channels)), expected)
    assert not recwarn.list


def test_cmyk_jpeg_is_converted(tmp_path):
    Image.new("RGB", (16, 16), (200, 30, 60)).convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    colour = decode(tmp_path / "a.jpg", 3).float().mean(dim=(1, 2))
    assert colour.tolist() == pytest.approx([200, 30, 60], abs=4)


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_grey_keeps_its_upper_8_bits(tmp_path, channels):
    values = np.arange(0, 65536, 128, dtype=np.uint16).reshape(16, 32)
    Image.fromarray(values).save(tmp_path / "a.png")
    image = decode(tmp_path / "a.png", channels)
    assert image.shape == (channels, 16, 32)
    assert all(np.array_equal(channel, values >> 8) for channel in image.numpy())


@pytest.mark.parametrize(("orientation", "turned"), [(1, PIXELS), (3, PIXELS[::-1, ::-1]), (6, np.rot90(PIXELS, -1))])
def test_exif_orientation_is_applied(tmp_path, orientation, turned):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(as_array(decode(tmp_path / "a.png", 3)), turned)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("JPEG", ".+"), ("PNG", ".+"), ("WEBP", ".+"), (b"", "not a JPEG"), (b"GIF89a", "not a JPEG"), (None, ".*No such file")],
)
def test_truncated_file_or_file_that_is_no_image_is_named(tmp_path, content, reason):
    path = tmp_path / "a.jpg"
    if isinstance(content, str):
        picture().resize((300, 200)).save(path, format=content)
        content = path.read_bytes()[: path.stat().st_size // 2]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImageError, match=rf"{path}: cannot be decoded \({reason}"):
        decode(path, 3)


@pytest.mark.parametrize("shape", [(3, 40, 90), (1, 90, 40), (3, 7, 9), (3, 32, 32)])
def test_evaluation_view_is_torchvisions_resize_and_crop(shape):
    image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(evaluation_view(image, 32, 28), v2.Compose([v2.Resize(32), v2.CenterCrop(28)])(image))
    assert min(resize(image, 32).shape[1:]) == 32
