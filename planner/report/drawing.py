"""A chart that is drawn once and goes into the page as SVG, in the page's own colours, and beside it as PNG."""

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from planner.report.text import printable

COLOURS = {"ink": "#182126", "quiet": "#56636a", "rule": "#d8dedd", "accent": "#0b6872", "warn": "#a33a00",
           "cliff": "#c43c00", "sheet": "#ffffff"}
"""The light ones of template/style.css by their names there: a PNG has them as they are, the page as variables."""
TEXT_PX = 12
PNG_DPI = 130
PX_PER_IN = 72
"""What matplotlib makes of an inch in an SVG, so that its points are the page's pixels."""
XLINK = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Size:
    """Pixels, and how many marks the axes have room for. A page has each chart in both sizes, so that text keeps its size
    on a phone."""

    name: str
    width: int
    height: int
    marks_x: int
    marks_y: int

    @property
    def is_wide(self) -> bool:
        return self is WIDE


WIDE = Size("wide", 860, 330, 8, 7)
NARROW = Size("narrow", 344, 280, 4, 7)


@dataclass
class Drawing:
    """A matplotlib figure, what is shown of its marks when pointed at, by their gid, and whether a mark "marker" is moved by
    the page's script over two logarithmic axes."""

    figure: Any
    axes: Sequence[Any]
    titles: dict[str, str] = field(default_factory=dict)
    has_marker: bool = False

    @classmethod
    def blank(cls, size: Size, height: float | None = None, rows: int = 1, columns: int = 1, **options: Any) -> "Drawing":
        """Axes without frames in a grid, of `size` but for another `height`."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(size.width / PX_PER_IN, (height or size.height) / PX_PER_IN), dpi=PX_PER_IN,
                        layout="constrained", facecolor="none")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
        for axis in axes:
            axis.set_facecolor("none")
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.spines["bottom"].set_color(COLOURS["quiet"])
            axis.set_axisbelow(True)
            style_ticks(axis)
        return cls(figure, list(axes))

    def mark(self, axis: Any, x: float, y: float, title: str, **style: Any) -> None:
        """One mark that says what it is when pointed at."""
        gid = f"mark-{len(self.titles)}"
        self.titles[gid] = title
        axis.plot([x], [y], gid=gid, clip_on=False, **style)

    def png(self, title: str) -> bytes:
        """With a title, as it stands alone."""
        self.figure.suptitle(title, fontsize=TEXT_PX, color=COLOURS["ink"], x=0.01, ha="left", parse_math=False)
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png", dpi=PNG_DPI, facecolor=COLOURS["sheet"])
        return picture.getvalue()

    def svg(self, name: str, kind: str, label: str) -> str:
        """An <svg class="`kind`"> for inside HTML: its ids begin with `name` and `kind`, its text is text, its colours are
        the page's variables. `label` is for those who can't see it."""
        from matplotlib import rc_context

        text = io.BytesIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "spillcliff"}):
            self.figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        root = ElementTree.fromstring(text.getvalue())
        width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
        body = "".join(_markup(child, f"{name}-{kind}-", self.titles) for child in root)
        ends = _ends(self.axes[0], width, height) if self.has_marker else ""
        return (f'<svg class="{kind}" role="img" aria-label="{html.escape(label)}" viewBox="0 0 {width:g} {height:g}"{ends}>'
                f"{body}</svg>")


def style_ticks(axis: Any) -> None:
    axis.minorticks_off()
    axis.tick_params(length=0, labelsize=TEXT_PX, labelcolor=COLOURS["quiet"], pad=6)


def _ends(axis: Any, width: float, height: float) -> str:
    """For the script: the values at both ends of each axis, and where in the drawing these are."""
    box = axis.get_position()
    x = (*axis.get_xlim(), box.x0 * width, box.x1 * width)
    y = (*axis.get_ylim(), (1 - box.y0) * height, (1 - box.y1) * height)
    return "".join(f' data-{name}="{" ".join(repr(float(v)) for v in values)}"' for name, values in (("x", x), ("y", y)))


GEOMETRY: tuple[str, ...] = ("d", "x", "y", "transform")
_NUMBER = re.compile(r"-?\d+\.\d+")
_COLOUR_NAMES = {colour: name for name, colour in COLOURS.items()}


def _markup(element: ElementTree.Element, prefix: str, titles: dict[str, str]) -> str:
    """An element of matplotlib's SVG as HTML takes it. What only matplotlib needs is left out: ids, empty groups, the style
    that would be the whole page's, fonts that the page chooses, and invisible paths."""
    tag, gid = element.tag.rpartition("}")[2], element.get("id", "")
    if tag in ("metadata", "style") or element.get("style") == "fill: none":
        return ""
    content = html.escape(element.text or "") if tag == "text" else "".join(
        _markup(child, prefix, titles) for child in element)
    attributes: dict[str, str] = {name: _short(element.attrib[name]) for name in GEOMETRY if name in element.attrib}
    if attributes.get("transform", "").startswith("rotate(-0"):
        del attributes["transform"]
    if tag == "path" and gid:
        attributes["id"] = prefix + gid
    if XLINK in element.attrib:
        attributes["href"] = f"#{prefix}{element.attrib[XLINK][1:]}"
    if style := _style(element.get("style", "")):
        attributes["style"] = style
    if gid in titles:
        content += f"<title>{html.escape(printable(titles[gid]))}</title>"
    if gid == "marker":
        content, attributes = _movable(content)
    elif tag in ("g", "defs") and (not content or (tag == "g" and not attributes and gid not in titles)):
        return content
    told = "".join(f' {name}="{html.escape(value)}"' for name, value in attributes.items())
    return f"<{tag}{told}>{content}</{tag}>"


def _short(value: str) -> str:
    """To a tenth of a pixel (the shapes of marks to a hundredth), in one line."""
    digits = 1 if len(value) < 40 or "C" not in value else 2
    return " ".join(_NUMBER.sub(lambda match: f"{float(match[0]):.{digits}f}".rstrip("0").rstrip("."), value).split())


def _style(style: str) -> str:
    weight = ";font-weight:600" if "font-weight: 700" in style else ""
    kept = [part.strip().replace(": ", ":") for part in style.split(";") if part.strip() and not part.strip().startswith(
        ("font", "stroke-linejoin", "stroke-linecap", "stroke-miterlimit"))]
    return re.sub("#[0-9a-f]{6}", lambda m: f"var(--{_COLOUR_NAMES.get(m[0], 'ink')})", ";".join(kept)) + weight


def _movable(content: str) -> tuple[str, dict[str, str]]:
    """Marks that stand at one place as marks at 0, 0 of a group that stands there."""
    place = re.search(r' x="([\d.]+)" y="([\d.]+)"', content)
    assert place
    return content.replace(place[0], ""), {"class": "marker", "transform": f"translate({place[1]} {place[2]})"}
