"""Convergence bounds of ADL, by the equation numbers of the paper.

The paper is Zhuang, Lin, Toh, "Accumulated Decoupled Learning"; its equations are numbered (1), (2), ... from the
start. Its letters are kept: K stages, M gradients per update, S updates, gamma step size, L Lipschitz constant of the
gradient, A bound of the mean squared norm of a stochastic gradient, Delta = f(theta^0) - f(theta*), dbar_k mean
staleness of stage k. The staleness of a method is that of its program (interpreter.py).

Every theorem has versions:

    "stated"      as displayed in the paper. The proofs have errors (3 to 6 below), and Theorems 1 and 2 do not hold:
                  tests/test_theory.py has a counterexample, f(x) = x^2/2 with K=8 and M=14
    "proof"       Theorem 3 only: the step size of its proof, which its bound needs (error 1)
    "corrected"   f is L-smooth as a whole (8) and A bounds the second moment of the whole gradient (7). The staleness
                  enters by its mean square q_k (4) and is divided by M once (3). sigma bounds by how much earlier step
                  sizes were larger (5)

Errors in the paper:

    1   the step size of Theorem 3 has 1 + sum_k dbar_k; its proof has 1 + (1/M) sum_k dbar_k
    2   the bounds are called lower bounds; all are upper bounds
    3   Jensen's inequality gives 1/M where the proof has 1/M^2
    4   the sum of d updates is bounded with a factor d (Cauchy-Schwarz), which is missing: d^2 replaces d
    5   with step sizes that do not increase, the earlier ones are larger, not smaller
    6   in the telescoped sum an index, an equality sign and powers of M are wrong
    7   A2 bounds the second moment, not the variance; a bound per layer does not bound the whole network
    8   A1 bounds the change of a block's gradient by that of its own block only, but it depends on all layers
    9   a gradient is not unbiased given the weights that it is applied to, where other stages have used its batch
    10  the corollary shows that a weighted mean of E|grad f|^2 tends to 0, not that E|grad f|^2 does
    11  momentum, weight decay and BatchNorm are not covered

The corrected bounds need gradients that are unbiased given the weights that they are applied to (9). This is exact for
window="count": update s of every stage applies the batches Ms..Ms+M-1, and no version up to s depends on them. It does
not hold for window="aligned".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from offbeat.errors import UserError, unknown
from offbeat.interpreter import SteadyState, steady_state
from offbeat.method import Method
from offbeat.methods import ADL

Version = Literal["stated", "corrected"]
StepVersion = Literal["stated", "proof", "corrected"]
LARGEST_M = 2**14  # that `smallest_M` tries


# --- staleness ----------------------------------------------------------------------------------------------------


def _steady_states(method: Method, K: int) -> list[SteadyState]:
    return [steady_state(method, k, K) for k in range(1, K + 1)]


def total_staleness(method: Method, K: int) -> float:
    """Sum over the stages of the mean staleness dbar_k, eq. (19); K(K-1)/M for ADL.

    >>> total_staleness(ADL(M=4), 8), 8 * 7 / 4
    (14.0, 14.0)
    """
    return sum(state.staleness for state in _steady_states(method, K))


def total_square_staleness(method: Method, K: int) -> float:
    """Sum over the stages of the mean squared staleness q_k; (2/3) K (K-1) (2K-1) for ADL with M = 1.

    Times M^2 it is at least the sum of the squared lags, and equal to it where M divides them all:

    >>> total_square_staleness(ADL(M=1), 8), 2 * 8 * 7 * 15 / 3
    (560.0, 560.0)
    >>> [round(M**2 * total_square_staleness(ADL(M), 8), 9) for M in (1, 2, 4, 8, 14)]
    [560.0, 560.0, 576.0, 640.0, 784.0]
    """
    return sum(state.square_staleness for state in _steady_states(method, K))


def smallest_M(method: Method, K: int, budget: float) -> int | None:  # noqa: N802
    """The smallest M for which the mean staleness of every stage is at most the budget; None if no M is.

    >>> smallest_M(ADL(), 8, 1.5), smallest_M(ADL(), 8, 14), smallest_M(ADL(), 1, 0)
    (10, 1, 1)
    """
    k = max(range(1, K + 1), key=lambda k: method.lag(k, K))  # the stage with the most staleness

    def enough(M: int) -> bool:
        return replace(method.after_warmup, M=M).staleness(k, K) <= budget

    M = 1
    while not enough(M):
        M *= 2
        if M > LARGEST_M:
            return None
    least = M // 2  # not enough, or 0
    while M - least > 1:
        middle = (least + M) // 2
        least, M = (least, middle) if enough(middle) else (middle, M)
    return M


# --- Theorem 1: one update ----------------------------------------------------------------------------------------


def theorem_1(
    method: Method,
    K: int,
    *,
    gamma: float,
    squared_gradient: float,
    A: float,
    L: float,
    sigma: float = 1.0,
    version: Version = "corrected",
) -> float:
    """Theorem 1, eq. (24): upper bound of E f(theta^(s+1)) - f(theta^s), for L gamma <= 1.

    stated      -(gamma/2) |grad f|^2 + gamma^2 A L (1 + (1/M) sum_k dbar_k) / M
    corrected   -(gamma/2) |grad f|^2 + (gamma^2 A L / 2) (1/M + L gamma sigma^2 sum_k q_k)

    gamma is gamma_s, squared_gradient is |grad f(theta^s)|^2. sigma bounds gamma_a / gamma_s over the updates a between
    the forward of a gradient and update s (see `step_ratio`).

    >>> theorem_1(ADL(M=1), 1, gamma=0.5, squared_gradient=1, A=1, L=1, version="stated")
    0.0
    >>> theorem_1(ADL(M=1), 1, gamma=0.5, squared_gradient=1, A=1, L=1)
    -0.125
    """
    _check_positive(A=A, L=L, K=K)
    _check_step(gamma, L)
    return -gamma / 2 * squared_gradient + gamma**2 * _excess(method, K, gamma, A, L, sigma, version)


# --- Theorem 2: any step sizes ------------------------------------------------------------------------------------


def theorem_2(
    method: Method,
    K: int,
    *,
    gammas: Sequence[float],
    Delta: float,
    A: float,
    L: float,
    sigma: float | None = None,
    version: Version = "corrected",
) -> float:
    """Theorem 2, eq. (25): upper bound of (1/T_S) sum_s gamma_s E|grad f(theta^s)|^2, T_S = sum_s gamma_s.

    stated      2 Delta / T_S + 2 A L (1 + (1/M) sum_k dbar_k) (sum_s gamma_s^2) / (M T_S)
    corrected   2 Delta / T_S + (A L / T_S) sum_s gamma_s^2 (1/M + L gamma_s sigma^2 sum_k q_k)

    The left side is the mean for an iterate drawn with probability gamma_s / T_S. As stated, the step sizes must not
    increase; the corrected bound needs only sigma, by default that of these step sizes. The bound tends to 0 if
    sum gamma_s diverges and sum gamma_s^2 converges (Corollary 1).

    >>> theorem_2(ADL(M=2), 1, gammas=[0.1] * 100, Delta=1, A=1, L=1)
    0.25
    """
    _check_positive(A=A, L=L, K=K, Delta=Delta, S=len(gammas))
    _check_step(max(gammas), L)
    _check_positive(gamma=min(gammas))
    if version == "stated" and any(later > earlier for earlier, later in itertools.pairwise(gammas)):
        raise UserError('step sizes that increase: Theorem 2 as stated does not allow them; use version="corrected"')
    if sigma is None:
        sigma = step_ratio(gammas, max(max(state.levels) for state in _steady_states(method, K)))
    excess = math.fsum(gamma**2 * _excess(method, K, gamma, A, L, sigma, version) for gamma in gammas)
    return (2 * Delta + 2 * excess) / math.fsum(gammas)


def step_ratio(gammas: Sequence[float], reach: int) -> float:
    """sigma: the largest gamma_(s-d) / gamma_s over 0 <= d <= reach, with reach the largest staleness.

    >>> step_ratio([1.0, 1.0, 0.1, 0.1], 1), step_ratio([0.1] * 5, 3)
    (10.0, 1.0)
    """
    return max(max(gammas[max(0, s - reach) : s + 1]) / gamma for s, gamma in enumerate(gammas))


# --- Theorem 3: a constant step size ------------------------------------------------------------------------------


def constant_step_bound(
    method: Method,
    K: int,
    *,
    gamma: float,
    Delta: float,
    A: float,
    L: float,
    S: float,
    version: Version = "corrected",
) -> float:
    """Upper bound of (1/S) sum_s E|grad f(theta^s)|^2 at a constant step size.

    stated      2 Delta / (gamma S) + 2 gamma A L (1 + (1/M) sum_k dbar_k) / M      eq. (33)
    corrected   2 Delta / (gamma S) + gamma A L / M + gamma^2 A L^2 sum_k q_k

    >>> constant_step_bound(ADL(M=2), 2, gamma=0.5, Delta=1, A=1, L=1, S=100)
    0.54
    """
    _check_positive(gamma=gamma, Delta=Delta, A=A, L=L, S=S, K=K)
    _check_step(gamma, L)
    return 2 * Delta / (gamma * S) + 2 * gamma * _excess(method, K, gamma, A, L, 1.0, version)


def theorem_3_step(
    method: Method,
    K: int,
    *,
    epsilon: float = 1.0,
    Delta: float,
    A: float,
    L: float,
    S: float,
    version: StepVersion = "corrected",
) -> float:
    """The constant step size of Theorem 3; an error where L gamma > 1, which the theorem excludes.

    stated      epsilon sqrt(M Delta / (S A L (1 + sum_k dbar_k)))
    proof       epsilon sqrt(M Delta / (S A L (1 + (1/M) sum_k dbar_k)))    what eq. (26) needs (error 1)
    corrected   epsilon sqrt(2 M Delta / (S A L))                           staleness is of higher order in 1/S

    The first two agree for M = 1. With epsilon = 1, "proof" minimises the stated bound, and "corrected" the corrected
    one without its staleness term.

    >>> known = dict(Delta=1, A=1, L=1, S=10_000)
    >>> versions = "stated", "proof", "corrected"
    >>> [round(theorem_3_step(ADL(M=4), 8, version=version, **known), 5) for version in versions]
    [0.00516, 0.00943, 0.02828]
    """
    _check_positive(epsilon=epsilon, Delta=Delta, A=A, L=L, S=S, K=K)
    _check_version(version, StepVersion)
    total = total_staleness(method, K)
    spread = {"stated": 1 + total, "proof": 1 + total / method.M, "corrected": 0.5}[version]
    gamma = epsilon * math.sqrt(method.M * Delta / (S * A * L * spread))
    if L * gamma > 1:
        most = epsilon / (L * gamma)
        raise UserError(
            f"epsilon = {epsilon:g} makes L gamma = {L * gamma:.3g}, above 1: use epsilon <= {most:.3g} or more updates"
        )
    return gamma


def theorem_3(
    method: Method,
    K: int,
    *,
    epsilon: float = 1.0,
    Delta: float,
    A: float,
    L: float,
    S: float,
    version: Version = "corrected",
) -> float:
    """Theorem 3, eq. (26): upper bound of min_s E|grad f(theta^s)|^2, and of the mean over s, at a constant step size.

    stated      ((2 + 2 epsilon^2) / epsilon) sqrt(A L Delta (1 + (1/M) sum_k dbar_k) / (M S))
    corrected   ((1 + epsilon^2) / epsilon) sqrt(2 A L Delta / (M S)) + 2 epsilon^2 L Delta M (sum_k q_k) / S

    The corrected bound belongs to the corrected step size; the stated bound to the step size of its proof, not to the
    stated one (error 1).

    >>> known = dict(Delta=1, A=1, L=1, S=10_000)
    >>> [round(theorem_3(ADL(M=4), 8, version=version, **known), 4) for version in ("stated", "corrected")]
    [0.0424, 0.0429]
    """
    _check_positive(epsilon=epsilon, Delta=Delta, A=A, L=L, S=S, K=K)
    _check_version(version, Version)
    M = method.M
    if version == "stated":
        factor = _stated_factor(method, K)
        return (2 + 2 * epsilon**2) / epsilon * math.sqrt(A * L * Delta * factor / (M * S))
    late = 2 * epsilon**2 * L * Delta * M * total_square_staleness(method, K) / S
    return (1 + epsilon**2) / epsilon * math.sqrt(2 * A * L * Delta / (M * S)) + late


# --- how the bound depends on K and M -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BoundRow:
    """The bound of the mean of E|grad f|^2 for one K and M after a fixed number of batches, with its terms.

    start, noise, staleness   of the corrected bound: 2 Delta/(gamma S), gamma A L/M, gamma^2 A L^2 sum_k q_k
    stated                    eq. (33) of the paper, for comparison
    applies                   whether L gamma <= 1, which both need
    mean_staleness            sum_k dbar_k
    square_staleness          M^2 sum_k q_k
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
    method: Callable[[int], Method] = ADL,
) -> list[BoundRow]:
    """How the bound depends on K and M with the linear learning-rate rule: gamma = step * M, S = batches / M.

    `step` is the step size per batch, `method` makes a method from M. In the corrected bound the first two terms do not
    depend on M. The last is step^2 A L^2 M^2 sum_k q_k, which is smallest for M = 1: with larger M an update is M times
    as large, and the staleness M times smaller. The stated bound, with 1 + (1/M) sum_k dbar_k = 1 + K(K-1)/M^2,
    decreases with M.

    >>> for row in bound_table(step=0.001, batches=100_000, Delta=1, A=1, L=1, K=[8], M=[1, 4, 14]):
    ...     print(row.K, row.M, *(f"{value:.5f}" for value in (row.start, row.noise, row.staleness, row.stated)))
    8 1 0.02000 0.00100 0.00056 0.13400
    8 4 0.02000 0.00100 0.00058 0.02900
    8 14 0.02000 0.00100 0.00078 0.02257
    """
    _check_positive(step=step, batches=batches, Delta=Delta, A=A, L=L)
    methods = [method(m) for m in M]
    return [_bound_row(each, stages, step, batches, Delta, A, L) for stages in K for each in methods]


def _bound_row(method: Method, K: int, step: float, batches: float, Delta: float, A: float, L: float) -> BoundRow:
    _check_positive(K=K)
    M, squares = method.M, total_square_staleness(method, K)
    gamma, S = step * M, batches / M
    start = 2 * Delta / (gamma * S)
    return BoundRow(
        K=K,
        M=M,
        gamma=gamma,
        S=S,
        mean_staleness=total_staleness(method, K),
        square_staleness=M**2 * squares,
        start=start,
        noise=gamma * A * L / M,
        staleness=gamma**2 * A * L**2 * squares,
        stated=start + 2 * gamma * _excess(method, K, gamma, A, L, 1.0, "stated"),
        applies=L * gamma <= 1,
    )


# --- shared -------------------------------------------------------------------------------------------------------


def _stated_factor(method: Method, K: int) -> float:
    return 1 + total_staleness(method, K) / method.M


def _excess(method: Method, K: int, gamma: float, A: float, L: float, sigma: float, version: Version) -> float:
    """What noise and staleness add to Theorem 1, divided by gamma^2."""
    _check_version(version, Version)
    if version == "stated":
        return A * L * _stated_factor(method, K) / method.M
    return A * L / 2 * (1 / method.M + L * gamma * sigma**2 * total_square_staleness(method, K))


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{name} = {value:g}: use a number above 0")


def _check_step(gamma: float, L: float) -> None:
    if L * gamma > 1 + 1e-12:  # gamma given as 1/L may be rounded up
        raise UserError(f"gamma = {gamma:g} with L = {L:g}: the theorems need L gamma <= 1, use gamma <= {1 / L:g}")


def _check_version(version: str, allowed: Any) -> None:
    if version not in get_args(allowed):
        raise unknown("version", version, get_args(allowed))
