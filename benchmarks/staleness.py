"""Write docs/staleness.md, docs/staleness-tables.md and their pictures from the records of `offbeat reproduce`.

python benchmarks/staleness.py              write them
python benchmarks/staleness.py --check      only compare, and fail where they are not current
"""

from __future__ import annotations

import staleness_tables
from page import RECORDS, ROOT, Picture, point, prose, publish, records
from staleness_aims import (
    AIM_STAGES,
    AIM_TABLE,
    REFERENCE,
    ImageTables,
    above_reference,
    aims_table,
    best_optimizer,
    method_of,
    recommended_rows,
    starts_text,
    title_of,
    updates_late,
)
from staleness_pictures import by_choice, by_stages, cost_by_optimizer
from staleness_records import IMAGES, MeasuredRow, MeasuredTable, language_tables

from offbeat.methods import with_settings
from offbeat.recommended import DELAY, EFFICIENT, LATE, ONE_IN, SYNCHRONOUS, correctors_by_optimizer
from offbeat.report.formatting import markdown

PAGE, TABLES_PAGE = ROOT / "docs/staleness.md", ROOT / "docs/staleness-tables.md"
COMMAND = "python benchmarks/staleness.py"


# ---- what late gradients cost


def cost_section(table: MeasuredTable) -> list[str]:
    """Each optimizer at AIM_STAGES, without and with what is recommended."""
    rows = {
        (optimizer, kind): found
        for optimizer in table.optimizers
        for kind, found in (
            ("", table.at_best_rates(AIM_STAGES, optimizer, corrected=False)),
            (", recommended", table.recommended(AIM_STAGES, optimizer)),
        )
    }
    columns = sorted({(row.staleness, row.method, row.M) for found in rows.values() for row in found})
    head = ["optimizer", "BP", *(f"{updates_late(late)}, `{method}` M={M}" for late, method, M in columns)]
    cells = []
    for (optimizer, kind), found in rows.items():
        by_column = {(row.staleness, row.method, row.M): row for row in found}
        shown = [_difference(table, by_column.get(column), recommended=bool(kind)) for column in columns]
        cells += [[title_of(optimizer) + kind, _own_bp(table, optimizer), *shown]] if found else []
    return [
        "## The optimizer decides",
        "",
        prose(
            f"{table.title}: each optimizer in {AIM_STAGES} stages, at the best of its learning rates. Dashed lines",
            "are its own back-propagation.",
        ),
        "",
        f"![Loss against staleness, by optimizer](results/{cost_by_optimizer(table, AIM_STAGES).name})",
        "",
        prose(
            "Nats above BP with the same optimizer. Recommended: with corrector `auto`, which is none for NAdam, and",
            f"after a synchronous start where stage 1 is more than {LATE:g} updates late. No start: measured only",
            "without one. Other rate: measured only at other learning rates than that of this BP, so that staleness",
            "is not the only difference.",
        ),
        "",
        markdown(head, cells),
        "",
    ]


def _own_bp(table: MeasuredTable, optimizer: str) -> str:
    bp = table.best_bp(AIM_STAGES, optimizer)
    return bp.shown(3) if bp else ""


def _difference(table: MeasuredTable, row: MeasuredRow | None, *, recommended: bool) -> str:
    difference = table.to_best_bp(row) if row else None
    if row is None or difference is None:
        return ""
    return f"{difference:+.3f}{table.remarks(row, recommended=recommended)}"


def remedies_section(table: MeasuredTable) -> list[str]:
    """What each remedy changed, with the optimizer that is recommended."""
    chosen, method = best_optimizer(table), method_of(AIM_STAGES)
    if chosen is None:
        return []

    def cost(M: int, *, optimizer: str = chosen, corrected: bool = True, warmup: bool = False) -> str:
        found = table.at_best_rates(AIM_STAGES, optimizer, corrected=corrected, warmup=warmup)
        row = next((row for row in found if (row.method, row.M) == (method, M)), None)
        return _difference(table, row, recommended=False) or "not measured"

    sizes = sorted({row.M for row in table.recommended(AIM_STAGES) if row.method == method}, reverse=True)
    middle = sizes[len(sizes) // 2]
    rows = [row for row in table.recommended(AIM_STAGES, chosen) if row.method == method]
    best = {row.M: _difference(table, row, recommended=True) for row in rows}
    by_M = "; ".join(f"M={M} {best[M]}" for M in sizes if M in best)
    return [
        "## What helps",
        "",
        prose(f"With {title_of(chosen)}, `{method}`, K={AIM_STAGES}, in nats above its BP:"),
        "",
        point(f"**More micro-batches per update**, which divide the staleness: {by_M}."),
        point(
            f'**A corrector** (`corrector="auto"`), at M={middle}: {cost(middle)} instead of',
            f"{cost(middle, corrected=False)}.",
        ),
        point(f"**A synchronous start**, at M={middle}: {cost(middle, warmup=True)} instead of {cost(middle)}."),
        point(
            f"**Another optimizer** than {title_of(REFERENCE)}, with which the difference is",
            f"{cost(middle, optimizer=REFERENCE, warmup=True)} there.",
        ),
        "",
    ]


# ---- the other sections


def images_section(images: ImageTables) -> list[str]:
    shown = stages_pictures(images)
    if not shown:
        return []
    return [
        "## Error against the number of stages",
        "",
        prose(
            "SGD with momentum and spike compensation (`sc`) on the 1F1B lag, ADL's own lag beside it; dashed: BP with",
            "the same M.",
        ),
        "",
        *(f"![Test error against the number of stages](results/{picture.name})\n" for picture in shown),
    ]


def stages_pictures(images: ImageTables) -> list[Picture]:
    """Error against K, where there are several values of it beside that of BP."""
    return [by_stages(table) for table in images.values() if len({row.K for row in table.rows}) > 2]


def aims_section(tables: list[MeasuredTable], images: ImageTables) -> list[str]:
    return [
        "## Aims, met and missed",
        "",
        prose(
            f"Of what is recommended; language models: nats above BP with the same optimizer, K={AIM_STAGES},",
            f"`{method_of(AIM_STAGES)}` unless another method is named. No start, other rate: as in the first table.",
            starts_text(tables),
        ),
        "",
        *([] if tables else ["There is no record of a language model yet.", ""]),
        aims_table(tables, images),
        "",
    ]


# ---- what to choose


def choice_section(tables: list[MeasuredTable]) -> list[str]:
    K = AIM_STAGES
    method = method_of(K)
    situations = [
        ["one stage", f"`{method_of(1)}`"],
        ["several stages, a message takes no longer than a stage computes", f"`{method}`"],
        ["several stages, a message takes longer than that", f"`{method_of(K, latency=1e6)}`"],
    ]
    correctors = {
        M: correctors_by_optimizer(with_settings(method, {"M": M, "corrector": "auto"}), K) for M in (16, 4, 1)
    }
    optimizers = list(correctors[1])
    late = {M: with_settings(method, {"M": M}).staleness(1, K) for M in correctors}
    rows = [[f"{updates_late(late[M])} (K={K}, M={M})", *by.values()] for M, by in correctors.items()]
    lines = [
        "## What to choose",
        "",
        prose(
            '`method="auto"` with the samples per update (`batch=`, `--batch-per-update`) chooses all of this but the',
            "optimizer; `offbeat plan` prints it.",
        ),
        "",
        markdown(["situation", "method"], situations),
        "",
        prose(
            "M is the largest power of two whose measured time per sample is at most",
            f"{EFFICIENT:g} times the shortest; it stops where stage 1 is {DELAY:g} updates late. The correctors",
            "follow from the optimizer and the delay of each stage:",
        ),
        "",
        markdown(["staleness of stage 1", *optimizers], rows),
        "",
        prose(
            f"Where M cannot be large, so that stage 1 is more than {LATE:g} updates late, the first {SYNCHRONOUS}",
            f"updates are synchronous (`--staleness-warmup {SYNCHRONOUS}`; `auto:staleness_warmup=0` leaves them out);",
            f"`offbeat train` limits them to {100 // ONE_IN} % of the run, and `Pipeline.fit` warns if they are more",
            "than half of it.",
            "In processes the M batches of each fill and drain the pipeline, so that it takes (M+K-1)/M times as long",
            f"as a late one: {(4 + K - 1) / 4:.3g} times at K={K} and M=4, and K times at M=1.",
        ),
        "",
    ]
    if main := main_table(tables):
        lines += choice_of(main, method)
    return [*lines, "More on each choice: [choosing K, M and a method](choosing.md).", ""]


def choice_of(table: MeasuredTable, method: str) -> list[str]:
    """What was measured of the recommended configuration, and the optimizer that follows."""
    found = above_reference(table)
    best = best_optimizer(table)
    if best is None:
        return []
    rows = []
    for optimizer in sorted(found, key=table.optimizers.index):
        cells = [
            f"{found[optimizer][K]:+.3f} (M={recommended_rows(table, K)[optimizer].M})" if K in found[optimizer] else ""
            for K in table.stages
        ]
        name = title_of(optimizer)
        rows.append([f"**{name}**" if optimizer == best else name, *cells])
    head = ["optimizer", *(f"K={K}" for K in table.stages)]
    worst = max(found[best].values())
    return [
        prose(
            f"{table.title}: validation loss of `{method}` with the recommended corrector and start, at the largest M",
            f"that was measured, minus that of BP with {title_of(REFERENCE)} at its best learning rate. The largest",
            f"difference over all K is smallest with {title_of(best)}: {worst:+.3f} nats.",
        ),
        "",
        markdown(head, rows),
        "",
        f"![Loss of the recommended method by M](results/{by_choice(table, method, REFERENCE).name})",
        "",
    ]


# ---- the page


def page(tables: list[MeasuredTable], images: ImageTables) -> str:
    lines = [
        "# Staleness: what late gradients cost",
        "",
        f"Generated by `{COMMAND}` from the records in `docs/results`; do not edit.",
        "",
        prose(
            "Stages that never wait for each other apply gradients late. The delay of stage k in updates is its lag in",
            "batches divided by M, the gradients per update: K-k batches on the 1F1B lag, 2(K-k) on ADL's. This page",
            "shows what the delay costs, how much depends on the optimizer, and what to choose; its figures are",
            f"[in these tables]({TABLES_PAGE.name}), with seeds, learning rates and times.",
        ),
        "",
    ]
    main = main_table(tables)
    lines += [*cost_section(main), *remedies_section(main)] if main else []
    lines += [*images_section(images), *aims_section(tables, images), *choice_section(tables)]
    return "\n".join(lines).rstrip() + "\n"


def main_table(tables: list[MeasuredTable]) -> MeasuredTable | None:
    return next((table for table in tables if table.slug == AIM_TABLE and AIM_STAGES in table.stages), None)


def pictures(tables: list[MeasuredTable], images: ImageTables) -> list[Picture]:
    main = main_table(tables)
    story = [cost_by_optimizer(main, AIM_STAGES), by_choice(main, method_of(AIM_STAGES), REFERENCE)] if main else []
    return [*story, *stages_pictures(images), *staleness_tables.pictures(tables)]


def main() -> None:
    again = records("reproduction")
    tables = language_tables(again)
    images = {experiment: experiment.table_of(again) for experiment in IMAGES}
    drawn = pictures(tables, images)
    left_over = set(RECORDS.glob("staleness-*.svg")) - {picture.path for picture in drawn}
    pages = {PAGE: page(tables, images), TABLES_PAGE: staleness_tables.page(tables, images, COMMAND)}
    publish(pages, COMMAND, pictures=drawn, left_over=left_over)


if __name__ == "__main__":
    main()
