"""The published experiments, row by row, and our own: each row makes its complete recipe."""

from __future__ import annotations

from offbeat.runs.tables.ablation import ABLATION
from offbeat.runs.tables.cifar10 import CIFAR10_TABLE
from offbeat.runs.tables.curves import CURVES
from offbeat.runs.tables.gpt import GPT_STALENESS, SMALL_GPT_STALENESS
from offbeat.runs.tables.imagenet import IMAGENET_TABLE
from offbeat.runs.tables.row import Images, Paper, Table, TableRow

TABLES: dict[str, Table] = {
    table.name: table for table in (CIFAR10_TABLE, ABLATION, CURVES, IMAGENET_TABLE, GPT_STALENESS, SMALL_GPT_STALENESS)
}

__all__ = ["TABLES", "Images", "Paper", "Table", "TableRow"]
