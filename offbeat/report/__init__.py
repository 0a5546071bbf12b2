"""What is shown of methods and runs: pictures in files, tables, and the HTML report.

    read, traces, cuts                       what run folders hold
    comparison, reproduction                 tables, for the terminal and for documents
    bench_table, until_table
    charts, figures, style                   charts as declarations for Vega-Lite; the only ones that import Altair
    draw, text                               pictures in files
    page, sections, overview, stages, ...    the HTML report, in the template page.html

It reads records and the clock, and computes no schedule of its own.

May import runs and all that is above it in docs/architecture.md.
"""

from __future__ import annotations

from offbeat.report.draw import draw_curves, draw_staleness, draw_timeline

__all__ = ["draw_curves", "draw_staleness", "draw_timeline"]
