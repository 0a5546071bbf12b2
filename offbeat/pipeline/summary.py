"""A pipeline in a few lines of text: method, stages, balance, engine and staleness."""

from __future__ import annotations

from offbeat.pipeline.assembly import Assembly
from offbeat.pipeline.local_stages import LocalStages


def summary(local: LocalStages) -> str:
    """One line for the pipeline, and one for each stage once the model is cut."""
    choice, costs = local.choice, local.assembly.costs if local.assembly else ()
    chosen = " (auto)" * (choice.recommendation is not None)
    facts = {
        "method": "auto (measured on the first batch)" if choice.measures else f"{local.method.name}{chosen}",
        "K": local.K,
        "M": None if choice.measures else local.method.M,
        "staleness_warmup": sum(updates for _, updates in local.method.staleness_warmup) or None,
        "batch": local.batch * local.replicas if local.batch else None,
        "replicas": local.replicas if local.replicas > 1 else None,
        "engine": type(local.engine).__name__.lower(),
        "balance": f"{sum(costs) / len(costs) / max(costs):.2f}" if any(costs) else None,
    }
    first = f"Pipeline({', '.join(f'{name}={value}' for name, value in facts.items() if value is not None)})"
    stages = [_stage_line(local, local.assembly, k) for k in range(1, local.K + 1)] if local.assembly else []
    return "\n".join([first, *stages])


def _stage_line(local: LocalStages, assembly: Assembly, k: int) -> str:
    costs, parameters = assembly.costs, sum(p.numel() for p in assembly.parts[k - 1].parameters())
    work = f"{100 * costs[k - 1] / sum(costs):.0f} % of the work, " if any(costs) else ""
    staleness = f"staleness {local.method.staleness(k, local.K):g}, corrector {assembly.correctors[k - 1]}"
    return f"  stage {k}: {parameters:,} parameters, {work}{staleness}"
