"""Draws plans and page usage as SVG for notebooks, without additional dependencies."""
from __future__ import annotations

from html import escape
from typing import Any, Iterable

COLOURS = {"slab": "#4c78a8", "tables": "#f58518", "scratch": "#54a24b", "stacks": "#b279a2",
           "shared": "#4c78a8", "held": "#9ecae9", "cached": "#f2cf5b", "free": "#eeeeee"}
WIDTH = 640


def table_html(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns an HTML table with escaped cells."""
    cells = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(c)}</th>" for c in head) + f"</tr>{cells}</table>"


def _bar(y: int, parts: Iterable[tuple[str, float]], total: float) -> str:
    x, out = 0.0, []
    for name, size in parts:
        width = WIDTH * size / total if total else 0
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{COLOURS[name]}">'
                   f"<title>{name}: {size:,.0f}</title></rect>")
        x += width
    return "".join(out)


def _svg(height: int, body: str) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
            f"{body}</svg>")


def plan_svg(plan: Any) -> str:
    """Draws one bar with the parts of a plan's memory."""
    parts = [(name, getattr(plan, f"{name}_bytes")) for name in ("slab", "tables", "scratch", "stacks")]
    label = f"{plan.total_bytes / 1e6:,.1f} MB for {plan.max_tokens:,} tokens, {plan.token_bytes:,} bytes per token"
    return _svg(56, f'<text x="0" y="16">{label}</text>' + _bar(26, parts, plan.total_bytes))


def pages_svg(stats: Any) -> str:
    """Draws one bar per layer group with its shared, held, cached and free pages."""
    body, y = "", 0
    for i, g in enumerate(stats.groups):
        label = f"group {i}: {g.pages} pages, {g.held} held ({g.shared} shared), {g.cached} cached, {g.free} free, {g.promised} reserved"
        parts = [("shared", g.shared), ("held", g.held - g.shared), ("cached", g.cached), ("free", g.free)]
        body += f'<text x="0" y="{y + 16}">{label}</text>' + _bar(y + 24, parts, g.pages)
        y += 56
    return _svg(max(y, 1), body)
