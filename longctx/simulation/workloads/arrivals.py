"""Arrival times of requests: at random, as in a trace, or after the answer before."""

import dataclasses
import math
from collections.abc import Sequence as List

import numpy as np

from longctx.models.validation import check_integer, check_real, shown
from longctx.simulation.workloads.request import MAX_ARRIVAL, WorkloadRequest

MAX_RATE = 1e9  # requests a second


def arrive_at_rate(requests: List[WorkloadRequest], rate: float, seed: int = 0) -> list[WorkloadRequest]:
    """Give requests the arrival times of a Poisson process of `rate` a second; with an infinite rate all are 0.

    Follow-ups keep following whom they follow, and take no part in the process.

    Args:
      requests: who come, in any order.
      rate: requests a second, on average; infinite: all come at 0.
      seed: of the random times.

    Returns:
      The requests, with an `arrival` in seconds, sorted by it.

    Raises:
      TypeError, ValueError: the rate is not positive.

    Examples:
      >>> from longctx.simulation.workloads import Lengths, arrive_at_rate, synthesize
      >>> requests = synthesize(1000, Lengths(100, 2000), Lengths(10, 50))
      >>> timed = arrive_at_rate(requests, rate=4.0)
      >>> round(timed[-1].arrival / len(timed), 2)  # seconds between requests, on average
      0.26
    """
    first = [request for request in requests if request.after is None]
    if rate == math.inf:
        times = [0.0] * len(first)
    else:
        _check_rate(rate)
        times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(first))).tolist()
    return _with_times(requests, times)


def jitter_arrivals(requests: List[WorkloadRequest], seconds: float = 3.0, seed: int = 0) -> list[WorkloadRequest]:
    """Move each arrival by a random part of `seconds` to later times, and sort the requests by arrival again.

    Timestamps of Mooncake's traces are on ticks of 3 s: bursts that were none. Follow-ups keep their
    delays, and stand after whom they follow.

    Args:
      requests: whose arrivals are moved.
      seconds: the most that one is moved by.
      seed: of the random moves.

    Returns:
      The requests, sorted by their new `arrival`, in seconds.

    Raises:
      TypeError, ValueError: seconds is negative or not finite.

    Source:
      The ticks are those of the traces that Mooncake's repository publishes.

    Examples:
      >>> from longctx.simulation.workloads import WorkloadRequest, jitter_arrivals
      >>> burst = [WorkloadRequest(3.0, 100, 10, number=number) for number in range(3)]  # on one tick of the trace
      >>> [round(request.arrival, 2) for request in jitter_arrivals(burst)]
      [3.12, 3.81, 4.91]
    """
    check_real("seconds", seconds, 0, MAX_ARRIVAL)
    moves = np.random.default_rng(seed).uniform(0, seconds, len(requests)).tolist()
    arrivals: dict[int, float] = {}  # a follow-up stands after whom it follows, however far that one was moved
    moved = []
    for request, move in zip(requests, moves, strict=True):
        if request.after is None:
            arrival = request.arrival + move
        else:
            arrival = max(request.arrival, arrivals.get(request.after, 0.0))
        arrivals[request.number] = arrival
        moved.append(dataclasses.replace(request, arrival=arrival))
    return sorted(moved, key=lambda request: request.arrival)


def closed_loop(requests: List[WorkloadRequest], users: int, delay: float = 0.0) -> list[WorkloadRequest]:
    """Let `users` users send the requests in turn, each its next one `delay` seconds after the end of the one before.

    Args:
      requests: what the users send; user 0 has the first one, and every `users`-th after it.
      users: how many of them there are.
      delay: seconds from an answer's end to the user's next request.

    Returns:
      The requests, of which all but the first of each user, at 0, follow another one.

    Raises:
      TypeError, ValueError: there is no user, a number is negative, or requests follow others already.

    Examples:
      >>> from longctx.simulation.workloads import Lengths, closed_loop, synthesize
      >>> requests = closed_loop(synthesize(4, Lengths(100, 100), Lengths(10, 10)), users=2, delay=1.5)
      >>> [(request.number, request.session, request.after, request.delay) for request in requests]
      [(0, 'user-0', None, 0.0), (1, 'user-1', None, 0.0), (2, 'user-0', 0, 1.5), (3, 'user-1', 1, 1.5)]
    """
    check_integer("users", users, 1)
    check_real("delay", delay, 0, MAX_ARRIVAL)
    if any(request.after is not None for request in requests):
        raise ValueError("requests must not follow others already")
    looped = []
    for number, request in enumerate(requests):
        follows = number >= users
        looped.append(
            dataclasses.replace(
                request,
                number=number,
                arrival=0.0,
                after=number - users if follows else None,
                delay=delay if follows else 0.0,
                session=f"user-{number % users}",
            )
        )
    return looped


def _check_rate(rate: float) -> float:
    value = check_real("rate", rate, 0, MAX_RATE)
    if value == 0:
        raise ValueError(f"rate must be above 0, got {shown(rate)}")
    return value


def _with_times(requests: List[WorkloadRequest], times: List[float]) -> list[WorkloadRequest]:
    """Give times to requests that follow none; a follow-up has the time of the request that it follows."""
    arrivals: dict[int, float] = {}
    given = iter(times)
    found = []
    for request in sorted(requests, key=lambda request: request.number) if _has_followers(requests) else requests:
        arrival = next(given) if request.after is None else arrivals.get(request.after, 0.0)
        arrivals[request.number] = arrival
        found.append(dataclasses.replace(request, arrival=arrival))
    return sorted(found, key=lambda request: request.arrival)


def _has_followers(requests: List[WorkloadRequest]) -> bool:
    return any(request.after is not None for request in requests)
