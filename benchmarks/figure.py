"""Draw docs/speed.svg from the files in results/: how many times as fast as Transformers a base-size model is.

    python benchmarks/figure.py

A bar's solid part ends at the smallest ratio of all machines, its light part at the largest, as in the README's table.
tests/test_benchmarks.py compares the drawing with the file.
"""

from pathlib import Path

from table import README_CASES, ratio_values

TARGET = Path(__file__).parents[1] / "docs" / "speed.svg"
SERIES = {"this package": "hf_deberta", "`optimize()`": "after optimize()"}  # column -> legend
COLOURS = ("#0f766e", "#d97706")
WIDTH, UNIT, BAR, CASE = 480, 62, 18, 82  # the picture, one time, the height of a bar and of a case
TOP = 34  # below the legend
STYLE = """text { font: 15px system-ui, sans-serif; fill: #1f2328; }
@media (prefers-color-scheme: dark) { text { fill: #e6e6e6; } }"""


def range_text(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def transformers_line(x: int, y: int, height: int) -> str:
    return f'<path d="M{x} {y}v{height}" stroke="#888" stroke-width="2" stroke-dasharray="4 3"/>'


def draw_case(label: str, ratios: list[list[float]], top: int) -> list[str]:
    """Return the elements of one case: its name, and for each series a bar with its range."""
    elements = [f'<text x="0" y="{top + 14}" font-weight="600">{label}</text>']
    for i, (values, colour) in enumerate(zip(ratios, COLOURS, strict=True)):
        y = top + 22 + i * (BAR + 4)
        low, high = round(min(values) * UNIT), round(max(values) * UNIT)
        elements += [
            f'<rect y="{y}" width="{high}" height="{BAR}" fill="{colour}" opacity="0.4"/>',
            f'<rect y="{y}" width="{low}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{high + 6}" y="{y + 14}">{range_text(values)}</text>',
        ]
    return [*elements, transformers_line(UNIT, top + 20, 2 * BAR + 8)]


def figure() -> str:
    height = TOP + CASE * len(README_CASES)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">', f"<style>{STYLE}</style>"]
    for i, (name, colour) in enumerate(zip(SERIES.values(), COLOURS, strict=True)):
        x = 130 * i
        lines.append(f'<rect x="{x}" y="4" width="14" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{x + 20}" y="16">{name}</text>')
    lines += [transformers_line(307, 2, 18), '<text x="320" y="16">Transformers</text>']
    for i, ((dtype, mode, case), label) in enumerate(README_CASES.items()):
        ratios = [ratio_values(dtype, (mode, case), column) for column in SERIES]
        lines += draw_case(label, ratios, TOP + CASE * i)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(figure(), encoding="utf-8")
    print(TARGET)
