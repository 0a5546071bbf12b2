"""The published experiments: a function for each row of the paper's tables that returns its complete recipe."""

from __future__ import annotations

from offbeat.runs.tables.ablation import ABLATION
from offbeat.runs.tables.cifar10 import CIFAR10_TABLE
from offbeat.runs.tables.curves import CURVES
from offbeat.runs.tables.imagenet import IMAGENET_TABLE
from offbeat.runs.tables.row import Images, Paper, Table, TableRow

TABLES: dict[str, Table] = {table.name: table for table in (CIFAR10_TABLE, ABLATION, CURVES, IMAGENET_TABLE)}

__all__ = ["TABLES", "Images", "Paper", "Table", "TableRow"]
