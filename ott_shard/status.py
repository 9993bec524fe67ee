"""Why an iteration stopped."""

import enum


class Status(enum.IntEnum):
    """Why the iteration stopped; of several, the largest is the worst."""

    CONVERGED = 0
    STALLED = 1
    MAX_ITERATIONS = 2
    NOT_FINITE = 3
    INVALID_INPUT = 4

    @property
    def sentence(self) -> str:
        """What happened, what may have caused it and what to try."""
        return _SENTENCES[self]


_SENTENCES = {
    Status.CONVERGED: "the marginal error is within the threshold",
    Status.STALLED: (
        "rounding allows no smaller marginal error at this epsilon: (a) use float64, "
        "(b) use a larger epsilon, or (c) raise the threshold above `error_floor`"
    ),
    Status.MAX_ITERATIONS: (
        "max_iterations was reached before the threshold: (a) raise max_iterations, "
        "(b) use a larger epsilon, or (c) leave `acceleration` at its default"
    ),
    Status.NOT_FINITE: (
        "a NaN or an infinity appeared: (a) the points or weights contain one, (b) "
        "costs / epsilon overflow: use a larger epsilon or set scale_cost, or (c) all "
        "pairs of some point are forbidden"
    ),
    Status.INVALID_INPUT: (
        "the problem has no solution as posed: epsilon, scale_cost (a statistic of "
        "costs may be negative), tau_a or tau_b is out of range, a weight is negative, "
        "or a and b differ in mass while tau_a = tau_b = 1"
    ),
}
