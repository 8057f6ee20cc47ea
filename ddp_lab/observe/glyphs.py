"""Names in scripts that the font of a picture does not have, such as Chinese.

matplotlib would draw boxes, and warn of each.
"""

from collections.abc import Sequence


def drawable(names: Sequence[str]) -> list[str]:
    """Return the names of classes, or the number of a class whose name the font cannot draw."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    known = [all(font.get_char_index(ord(character)) for character in name) for name in names]
    return [name if known[number] else str(number) for number, name in enumerate(names)]
