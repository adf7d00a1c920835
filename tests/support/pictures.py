"""What tests look for in a picture: words that lie on top of each other."""

import itertools

from matplotlib.text import Text


def drawn_texts(figure) -> list[Text]:
    """All words that a figure shows; matplotlib keeps ticks outside of an axis too, and does not draw them."""
    figure.draw_without_rendering()
    ticks, drawn = set(), set()
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            ticks |= {tick.label1, tick.label2}
            drawn |= {tick.label1, tick.label2} if low <= tick.get_loc() <= high else set()
    texts = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible() and artist.get_text())
    return [text for text in texts if text not in ticks or text in drawn]


def overlapping(figure) -> list[tuple[str, str]]:
    """Pairs of words whose boxes overlap."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn_texts(figure)]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
