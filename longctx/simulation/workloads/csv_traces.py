"""CSV files: lists of lengths, Azure's traces, BurstGPT."""

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from longctx.serving.validation import MAX_INT32, check_real, shown
from longctx.simulation.workloads.request import MAX_ARRIVAL, WorkloadRequest
from longctx.simulation.workloads.rows import BadRowError, Row


def read_csv(file: Iterable[str]) -> Iterator[WorkloadRequest]:
    """The requests of a CSV file, in its order; its columns say which of `_FORMS` it is.

    Raises:
      BadRowError: a row has another form.
    """
    csv.field_size_limit(MAX_INT32)
    rows = csv.DictReader(file)
    columns = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = columns
    form = max(_FORMS, key=lambda form: len({*form} & {*columns}))
    if missing := [name for name in form if name not in columns]:
        known = "; ".join(", ".join(form) for form in _FORMS)
        raise BadRowError(1, f"columns {', '.join(map(repr, missing))} are missing: a CSV file has one of {known}")
    number, parse = 0, _FORMS[form]()
    for values in rows:
        request = parse(Row(rows.line_num, values), number)
        if request is not None:
            yield request
            number += 1


def _lengths() -> Callable[[Row, int], WorkloadRequest]:
    def parse(row: Row, number: int) -> WorkloadRequest:
        prompt, output = row.tokens("num_prefill_tokens"), row.tokens("num_decode_tokens")
        return row.request(row.seconds("arrived_at"), prompt, output, number)

    return parse


def _azure() -> Callable[[Row, int], WorkloadRequest]:
    first: list[float] = []

    def parse(row: Row, number: int) -> WorkloadRequest:
        time = _timestamp(row)
        first[:] = first or [time]
        try:
            arrival = check_real("TIMESTAMP, less that of the first request,", time - first[0], 0, MAX_ARRIVAL)
        except ValueError as error:
            raise row.bad(error) from None
        return row.request(arrival, row.tokens("ContextTokens"), row.tokens("GeneratedTokens"), number)

    return parse


def _timestamp(row: Row) -> float:
    text = row.value("TIMESTAMP").strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise row.bad(f"TIMESTAMP must be a date or seconds, got {shown(text)}") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _burst() -> Callable[[Row, int], WorkloadRequest | None]:
    def parse(row: Row, number: int) -> WorkloadRequest | None:
        row.value("Timestamp")
        prompt, output = row.tokens("Request tokens", 0), row.tokens("Response tokens", 0)
        return row.request(row.seconds("Timestamp"), prompt, output, number) if prompt and output else None

    return parse


_FORMS: dict[tuple[str, ...], Callable[[], Callable[[Row, int], WorkloadRequest | None]]] = {
    ("num_prefill_tokens", "num_decode_tokens"): _lengths,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burst,
}
