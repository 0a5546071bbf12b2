"""Staleness and convergence of lagged methods, by formula and by equation number.

The paper is Zhuang, Lin, Toh, "Accumulated Decoupled Learning"; its equations are counted (1), (2), ... from its start,
its errata by METHODS 6.2. Its letters are kept: K stages, M gradients an update, S updates, gamma step size,
L Lipschitz constant of the gradient, A bound of the mean squared norm of a stochastic gradient,
Delta = f(theta^0) - f(theta*), dbar_k mean staleness of stage k.

Every theorem comes in versions:

    "stated"      as the paper displays it. Its proof is wrong (errata 3-6), and so are Theorems 1 and 2 themselves:
                  tests/test_theory.py has f(x) = x^2/2 that breaks them at K=8, M=14
    "proof"       Theorem 3 only: the step size of its proof, which its own bound needs (erratum 1)
    "corrected"   METHODS 6.3: f is L-smooth as a whole (erratum 8), A bounds the second moment of the whole gradient
                  (erratum 7), the staleness enters by its mean square q_k (erratum 4), over M once (erratum 3), and
                  earlier steps may be sigma times as large (erratum 5)

The corrected bounds need each gradient to be unbiased given the weights it is applied to (erratum 9). "count" windows
give that exactly: update s of every stage applies the batches Ms..Ms+M-1, and no version up to s has seen them.
"aligned" windows do not. All is for plain SGD: no momentum, no weight decay, no BatchNorm (erratum 12).
All are upper bounds, where the paper says "lower" (erratum 2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from offbeat.errors import UserError, unknown

Lag = Callable[[int, int], int]
Version = Literal["stated", "corrected"]
StepVersion = Literal["stated", "proof", "corrected"]


# --- staleness ----------------------------------------------------------------------------------------------------


def staleness(lag: int, M: int, j: int) -> int:
    """Level of staleness of the j-th gradient of a window in steady state, eq. (17): ceil((lag - j) / M).

    For ADL the lag is 2(K-k) and this is d_{k,j} of the paper.

    >>> [staleness(4, 2, j) for j in range(2)], [staleness(2, 4, j) for j in range(4)]
    ([2, 2], [1, 1, 0, 0])
    """
    return -((j - lag) // M)


def mean_staleness(lag: int, M: int) -> float:
    """Mean over the window, dbar_k of eq. (19), exactly lag / M (Hermite's identity).

    >>> mean_staleness(14, 4)
    3.5
    """
    return lag / M


def mean_square_staleness(lag: int, M: int) -> float:
    """Mean of the squares over the window, q_k of METHODS 6.3, which replaces dbar_k in the bounds (erratum 4).

    With lag = q M + r the first r gradients have staleness q+1 and the other M-r have q: q^2 + (2q+1) r / M.

    >>> mean_square_staleness(14, 4), sum(staleness(14, 4, j) ** 2 for j in range(4)) / 4
    (12.5, 12.5)
    """
    q, r = divmod(lag, M)
    return q * q + (2 * q + 1) * r / M


def versions_held(lag: int, M: int) -> int:
    """Most parameter versions that batches in flight can need, the newest included: ceil(lag / M) + 1."""
    return -(-lag // M) + 1


def paper_lag(k: int, K: int) -> int:
    """Batches between forward and backward at stage k in the paper's theorems, eq. (15): 2(K-k)."""
    return 2 * (K - k)


def total_staleness(K: int, M: int, *, lag: Lag = paper_lag) -> float:
    """Sum over the stages of dbar_k; K(K-1)/M with the paper's lag.

    >>> total_staleness(8, 4), 8 * 7 / 4
    (14.0, 14.0)
    """
    return sum(lag(k, K) for k in range(1, K + 1)) / M


def total_square_staleness(K: int, M: int, *, lag: Lag = paper_lag) -> float:
    """Sum over the stages of q_k (METHODS 6.3); (2/3) K (K-1) (2K-1) with the paper's lag and M = 1.

    Times M^2 it is at least the sum of the squared lags, and equal to that where M divides them all:

    >>> total_square_staleness(8, 1), 2 * 8 * 7 * 15 / 3
    (560.0, 560.0)
    >>> [round(M**2 * total_square_staleness(8, M), 9) for M in (1, 2, 4, 8, 14)]
    [560.0, 560.0, 576.0, 640.0, 784.0]
    """
    return sum(mean_square_staleness(lag(k, K), M) for k in range(1, K + 1))


def smallest_M(lag: int, budget: float) -> int:  # noqa: N802
    """The smallest M whose mean staleness, lag / M, is at most the budget.

    >>> smallest_M(14, 1.5), smallest_M(14, 14), smallest_M(0, 0)
    (10, 1, 1)
    """
    if lag == 0:
        return 1
    if not budget > 0:
        raise UserError(f"a mean staleness of at most {budget:g} at lag {lag}: use a budget above 0, or one stage")
    M = max(1, math.ceil(lag / budget))
    while mean_staleness(lag, M) > budget:  # the division above may have rounded either way
        M += 1
    while M > 1 and mean_staleness(lag, M - 1) <= budget:
        M -= 1
    return M


# --- Theorem 1: one update ----------------------------------------------------------------------------------------


def theorem_1(
    *,
    gamma: float,
    squared_gradient: float,
    A: float,
    L: float,
    M: int,
    K: int,
    sigma: float = 1.0,
    version: Version = "corrected",
    lag: Lag = paper_lag,
) -> float:
    """Theorem 1, eq. (24): upper bound of E f(theta^(s+1)) - f(theta^s), for L gamma <= 1.

    stated      -(gamma/2) |grad f|^2 + gamma^2 A L (1 + (1/M) sum_k dbar_k) / M
    corrected   -(gamma/2) |grad f|^2 + (gamma^2 A L / 2) (1/M + L gamma sigma^2 sum_k q_k)     METHODS 6.3

    gamma is gamma_s, squared_gradient is |grad f(theta^s)|^2, and sigma bounds gamma_a / gamma_s over the updates a
    that a gradient in flight has missed (erratum 5; see `step_ratio`). The paper needs none as it takes the
    inequality the wrong way.

    >>> theorem_1(gamma=0.5, squared_gradient=1, A=1, L=1, M=1, K=1, version="stated")
    0.0
    >>> theorem_1(gamma=0.5, squared_gradient=1, A=1, L=1, M=1, K=1)
    -0.125
    """
    _check_positive(A=A, L=L, M=M, K=K)
    _check_step(gamma, L)
    return -gamma / 2 * squared_gradient + gamma**2 * _excess(gamma, A, L, M, K, sigma, version, lag)


def theorem_1_step(
    *,
    squared_gradient: float,
    A: float,
    L: float,
    M: int,
    K: int,
    sigma: float = 1.0,
    version: Version = "corrected",
    lag: Lag = paper_lag,
) -> float:
    """The step size below which Theorem 1 promises that the expected loss falls.

    stated      min(1/L, M |grad f|^2 / (2 A L (1 + (1/M) sum_k dbar_k)))       after eq. (24)
    corrected   min(1/L, gamma) with |grad f|^2 = gamma A L (1/M + L gamma sigma^2 sum_k q_k)

    >>> round(theorem_1_step(squared_gradient=0.1, A=1, L=1, M=4, K=8), 6)
    0.049347
    """
    _check_positive(A=A, L=L, M=M, K=K)
    _check_version(version, Version)
    if version == "stated":
        return min(1 / L, M * squared_gradient / (2 * A * L * _stated_factor(K, M, lag)))
    noise, late = 1 / M, L * sigma**2 * total_square_staleness(K, M, lag=lag)
    ratio = squared_gradient / (A * L)
    # the positive root of late gamma^2 + noise gamma = ratio, in the form that late = 0 does not upset
    return min(1 / L, 2 * ratio / (noise + math.sqrt(noise**2 + 4 * late * ratio)))


# --- Theorem 2 and the corollary: any step sizes ------------------------------------------------------------------


def theorem_2(
    *,
    gammas: Sequence[float],
    Delta: float,
    A: float,
    L: float,
    M: int,
    K: int,
    sigma: float | None = None,
    version: Version = "corrected",
    lag: Lag = paper_lag,
) -> float:
    """Theorem 2, eq. (25): upper bound of (1/T_S) sum_s gamma_s E|grad f(theta^s)|^2, T_S = sum_s gamma_s.

    stated      2 Delta / T_S + 2 A L (1 + (1/M) sum_k dbar_k) (sum_s gamma_s^2) / (M T_S)
    corrected   2 Delta / T_S + (A L / T_S) sum_s gamma_s^2 (1/M + L gamma_s sigma^2 sum_k q_k)

    The left side is the mean for an iterate drawn with probability gamma_s / T_S (erratum 10). As stated the step sizes
    must not increase; the corrected bound needs only sigma, by default that of these step sizes.

    >>> theorem_2(gammas=[0.1] * 100, Delta=1, A=1, L=1, M=2, K=1)
    0.25
    """
    _check_positive(A=A, L=L, M=M, K=K, Delta=Delta, S=len(gammas))
    _check_step(max(gammas), L)
    _check_positive(gamma=min(gammas))
    if version == "stated" and any(later > earlier for earlier, later in itertools.pairwise(gammas)):
        raise UserError(
            'these step sizes increase: Theorem 2 as stated needs that they do not; use version="corrected"'
        )
    if sigma is None:
        sigma = step_ratio(gammas, max(versions_held(lag(k, K), M) for k in range(1, K + 1)) - 1)
    excess = math.fsum(gamma**2 * _excess(gamma, A, L, M, K, sigma, version, lag) for gamma in gammas)
    return (2 * Delta + 2 * excess) / math.fsum(gammas)


def step_ratio(gammas: Sequence[float], reach: int) -> float:
    """sigma of erratum 5: the largest gamma_(s-d) / gamma_s over 0 <= d <= reach, the largest staleness.

    >>> step_ratio([1.0, 1.0, 0.1, 0.1], 1), step_ratio([0.1] * 5, 3)
    (10.0, 1.0)
    """
    return max(max(gammas[max(0, s - reach) : s + 1]) / gamma for s, gamma in enumerate(gammas))


@dataclass(frozen=True)
class Sums:
    """What the corollary asks of step sizes, at S updates: `total` must grow without bound, `squares` must not."""

    total: float
    squares: float

    @property
    def ratio(self) -> float:
        """sum gamma^2 / sum gamma: Theorem 2's bound vanishes exactly if this and 1 / total do."""
        return self.squares / self.total


def corollary(gammas: Iterable[float]) -> Sums:
    """Corollary 1: T_S = sum gamma_s and sum gamma_s^2 up to S; the bound of Theorem 2 tends to 0 if the first
    diverges and the second converges.

    No finite sequence can decide that; print it at growing S, or ask `corollary_holds` for a power law. It says that a
    weighted average of E|grad f|^2 tends to 0, so its lower limit is 0, and not that E|grad f|^2 does (erratum 10). The
    condition is sufficient only: it is `ratio` that must vanish. The corrected bound also needs sigma bounded.

    >>> for S in (10, 1000): print(f"{corollary(1 / (s + 1) for s in range(S)).ratio:.3f}")
    0.529
    0.220
    """
    values = list(gammas)
    _check_positive(S=len(values))
    return Sums(math.fsum(values), math.fsum(gamma**2 for gamma in values))


def corollary_holds(power: float) -> bool:
    """Whether gamma_s = c (s+1)^(-power) meets the corollary's condition: 1/2 < power <= 1.

    >>> [corollary_holds(power) for power in (0, 0.5, 0.6, 1, 1.1)]
    [False, False, True, True, False]
    """
    return 0.5 < power <= 1


# --- Theorem 3: a constant step size ------------------------------------------------------------------------------


def constant_step_bound(
    *,
    gamma: float,
    Delta: float,
    A: float,
    L: float,
    S: float,
    M: int,
    K: int,
    version: Version = "corrected",
    lag: Lag = paper_lag,
) -> float:
    """Upper bound of (1/S) sum_s E|grad f(theta^s)|^2 at a constant step size.

    stated      2 Delta / (gamma S) + 2 gamma A L (1 + (1/M) sum_k dbar_k) / M      eq. (33)
    corrected   2 Delta / (gamma S) + gamma A L / M + gamma^2 A L^2 sum_k q_k       METHODS 6.3

    >>> constant_step_bound(gamma=0.5, Delta=1, A=1, L=1, S=100, M=2, K=2)
    0.54
    """
    _check_positive(gamma=gamma, Delta=Delta, A=A, L=L, S=S, M=M, K=K)
    _check_step(gamma, L)
    return 2 * Delta / (gamma * S) + 2 * gamma * _excess(gamma, A, L, M, K, 1.0, version, lag)


def theorem_3_step(
    *,
    epsilon: float = 1.0,
    Delta: float,
    A: float,
    L: float,
    S: float,
    M: int,
    K: int,
    version: StepVersion = "corrected",
    lag: Lag = paper_lag,
) -> float:
    """The constant step size of Theorem 3; refused where L gamma > 1, which the theorem excludes.

    stated      epsilon sqrt(M Delta / (S A L (1 + sum_k dbar_k)))
    proof       epsilon sqrt(M Delta / (S A L (1 + (1/M) sum_k dbar_k)))    what eq. (26) needs (erratum 1)
    corrected   epsilon sqrt(2 M Delta / (S A L))                           staleness is of higher order in 1/S

    The first two agree at M = 1. At epsilon = 1, "proof" minimises the stated bound and "corrected" the corrected one
    less its staleness.

    >>> known = dict(Delta=1, A=1, L=1, S=10_000, M=4, K=8)
    >>> [round(theorem_3_step(version=version, **known), 5) for version in ("stated", "proof", "corrected")]
    [0.00516, 0.00943, 0.02828]
    """
    _check_positive(epsilon=epsilon, Delta=Delta, A=A, L=L, S=S, M=M, K=K)
    _check_version(version, StepVersion)
    total = total_staleness(K, M, lag=lag)
    spread = {"stated": 1 + total, "proof": 1 + total / M, "corrected": 0.5}[version]
    gamma = epsilon * math.sqrt(M * Delta / (S * A * L * spread))
    if L * gamma > 1:
        most = epsilon / (L * gamma)
        raise UserError(
            f"epsilon = {epsilon:g} makes L gamma = {L * gamma:.3g}, above 1: use epsilon <= {most:.3g} or more updates"
        )
    return gamma


def theorem_3(
    *,
    epsilon: float = 1.0,
    Delta: float,
    A: float,
    L: float,
    S: float,
    M: int,
    K: int,
    version: Version = "corrected",
    lag: Lag = paper_lag,
) -> float:
    """Theorem 3, eq. (26): upper bound of min_s E|grad f(theta^s)|^2, indeed of the mean over s, at a constant step.

    stated      ((2 + 2 epsilon^2) / epsilon) sqrt(A L Delta (1 + (1/M) sum_k dbar_k) / (M S))
    corrected   ((1 + epsilon^2) / epsilon) sqrt(2 A L Delta / (M S)) + 2 epsilon^2 L Delta M (sum_k q_k) / S

    The corrected one belongs to the corrected step size. The stated one does not belong to the stated step size but to
    the one of its proof; the stated step gives `theorem_3_at_the_stated_step` instead (erratum 1).

    >>> known = dict(Delta=1, A=1, L=1, S=10_000, M=4, K=8)
    >>> [round(theorem_3(version=version, **known), 4) for version in ("stated", "corrected")]
    [0.0424, 0.0429]
    """
    _check_positive(epsilon=epsilon, Delta=Delta, A=A, L=L, S=S, M=M, K=K)
    _check_version(version, Version)
    if version == "stated":
        factor = _stated_factor(K, M, lag)
        return (2 + 2 * epsilon**2) / epsilon * math.sqrt(A * L * Delta * factor / (M * S))
    late = 2 * epsilon**2 * L * Delta * M * total_square_staleness(K, M, lag=lag) / S
    return (1 + epsilon**2) / epsilon * math.sqrt(2 * A * L * Delta / (M * S)) + late


def theorem_3_at_the_stated_step(
    *, epsilon: float = 1.0, Delta: float, A: float, L: float, S: float, M: int, K: int, lag: Lag = paper_lag
) -> float:
    """What the paper's own eq. (33) gives at the step size that Theorem 3 states (erratum 1), with D = sum_k dbar_k:

        (2/epsilon) sqrt(A L Delta (1 + D) / (M S)) + 2 epsilon (1 + D/M) sqrt(A L Delta / (M S (1 + D)))

    For epsilon <= 1 and M > 1 it lies above eq. (26), which is therefore not proved for that step.

    >>> round(theorem_3_at_the_stated_step(Delta=1, A=1, L=1, S=10_000, M=4, K=8), 4)
    0.0503
    """
    _check_positive(epsilon=epsilon, Delta=Delta, A=A, L=L, S=S, M=M, K=K)
    D = total_staleness(K, M, lag=lag)
    start = 2 / epsilon * math.sqrt(A * L * Delta * (1 + D) / (M * S))
    return start + 2 * epsilon * (1 + D / M) * math.sqrt(A * L * Delta / (M * S * (1 + D)))


# --- how the bound moves with K and M -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BoundRow:
    """The bound of the mean of E|grad f|^2 for one K and M, after a fixed number of batches, by its terms.

    start, noise, staleness   of the corrected bound (METHODS 6.3): 2 Delta/(gamma S), gamma A L/M,
                              gamma^2 A L^2 sum_k q_k
    stated                    the paper's eq. (33), for comparison
    applies                   L gamma <= 1, which both need
    """

    K: int
    M: int
    gamma: float
    S: float
    mean_staleness: float
    square_staleness: float
    start: float
    noise: float
    staleness: float
    stated: float
    applies: bool

    @property
    def corrected(self) -> float:
        """The corrected bound: the sum of its terms."""
        return self.start + self.noise + self.staleness


def bound_table(
    *,
    step: float,
    batches: float,
    Delta: float,
    A: float,
    L: float,
    K: Iterable[int],
    M: Iterable[int],
    lag: Lag = paper_lag,
) -> list[BoundRow]:
    """How the bound moves with K and M at the linear learning-rate rule: gamma = step * M, S = batches / M.

    `step` is the step size a batch. By the corrected bound the first two terms do not depend on M at all, and the last
    is step^2 A L^2 M^2 sum_k q_k, which is nowhere below its value at M = 1 (METHODS 5.9, 6.3): an update is M times
    as large and the staleness M times less. As stated, 1 + (1/M) sum_k dbar_k = 1 + K(K-1)/M^2 seems to promise
    otherwise. mean_staleness is sum_k dbar_k, square_staleness is M^2 sum_k q_k.

    >>> for row in bound_table(step=0.001, batches=100_000, Delta=1, A=1, L=1, K=[8], M=[1, 4, 14]):
    ...     print(row.K, row.M, *(f"{value:.5f}" for value in (row.start, row.noise, row.staleness, row.stated)))
    8 1 0.02000 0.00100 0.00056 0.13400
    8 4 0.02000 0.00100 0.00058 0.02900
    8 14 0.02000 0.00100 0.00078 0.02257
    """
    _check_positive(step=step, batches=batches, Delta=Delta, A=A, L=L)
    accumulated = list(M)
    return [_bound_row(step, batches, Delta, A, L, stages, m, lag) for stages in K for m in accumulated]


def _bound_row(step: float, batches: float, Delta: float, A: float, L: float, K: int, M: int, lag: Lag) -> BoundRow:
    _check_positive(K=K, M=M)
    gamma, squares = step * M, total_square_staleness(K, M, lag=lag)
    start = 2 * Delta / (gamma * (batches / M))
    return BoundRow(
        K=K,
        M=M,
        gamma=gamma,
        S=batches / M,
        mean_staleness=total_staleness(K, M, lag=lag),
        square_staleness=M**2 * squares,
        start=start,
        noise=gamma * A * L / M,
        staleness=gamma**2 * A * L**2 * squares,
        stated=start + 2 * gamma * _excess(gamma, A, L, M, K, 1.0, "stated", lag),
        applies=L * gamma <= 1,
    )


# --- shared -------------------------------------------------------------------------------------------------------


def _stated_factor(K: int, M: int, lag: Lag) -> float:
    return 1 + total_staleness(K, M, lag=lag) / M


def _excess(gamma: float, A: float, L: float, M: int, K: int, sigma: float, version: Version, lag: Lag) -> float:
    """What noise and staleness add to Theorem 1, over gamma^2."""
    _check_version(version, Version)
    if version == "stated":
        return A * L * _stated_factor(K, M, lag) / M
    return A * L / 2 * (1 / M + L * gamma * sigma**2 * total_square_staleness(K, M, lag=lag))


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{name} = {value:g}: use a number above 0")


def _check_step(gamma: float, L: float) -> None:
    if L * gamma > 1 + 1e-12:  # the rounding of a gamma given as 1/L
        raise UserError(f"gamma = {gamma:g} with L = {L:g}: the theorems need L gamma <= 1, use gamma <= {1 / L:g}")


def _check_version(version: str, allowed: Any) -> None:
    if version not in get_args(allowed):
        raise unknown("version", version, get_args(allowed))
