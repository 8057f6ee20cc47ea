"""Write scikit-learn's digits as images/train/CLASS/NUMBER.png and images/val/CLASS/NUMBER.png."""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
    folder = Path("images", "val" if number % 5 == 0 else "train", str(label))
    folder.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray((pixels * 255 / 16).astype("uint8")).resize((32, 32))
    image.save(folder / f"{number:04d}.png")
