"""The clients' `verify`, `time` and `plan` methods: requests about an operation."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from convgrad._body import WIRES
from convgrad._call import Call, Stored, as_tensor
from convgrad._exchange import Requests, Target
from convgrad._methods import described_like
from convgrad._reply import Reply, read_json
from convgrad.errors import InvalidAnswer, MalformedRequest

if TYPE_CHECKING:  # pydantic is imported with the first call, not with the package
    from pydantic import BaseModel

    from convgrad._shared_calls import SharedMemory
    from convgrad.contract.timing import PlanExplained, TimedPlan
    from convgrad.contract.verification import Verification

__all__ = ["AsyncExaminations", "Examinations"]

R = TypeVar("R")


class Examinations:
    """Mixin of `Client`."""

    _complete: Callable[[Target[Any]], Any]
    _send_all: Callable[[Requests[Any]], Any]
    _shared: SharedMemory | None

    def verify(
        self,
        operation: str,
        result: Any,
        *,
        second: Any = None,
        doubled: Any = None,
        linear: Mapping[str, tuple[Any, Any]] | None = None,
        **fields: Any,
    ) -> Verification:
        """Check a result of your own against a float64 reference computed by the server.

        Parameters
        ----------
        operation
            Name of the operation, such as ``conv_bwd_data``.
        result
            The output, or a mapping of outputs by name.
        second
            The result of a second run, which must be bit-identical to the first.
        doubled
            The result of a run with the operation's first tensor doubled, which must be twice the
            first.
        linear
            By name of a tensor x, the results with x replaced by y and by x + y, where
            `convgrad.check.linear_pair` makes both; see `convgrad.check.bounded`.
        **fields
            The operation's tensors and parameters. Tensors may be omitted if ``layer`` gives their
            shapes, in any notation that `convgrad.layers` reads: the server then draws them from
            ``seed`` and ``distribution``, as `convgrad.check.draw` does. For ``dtype``, ``batch``,
            ``shapes``, ``factors`` and ``sums`` see docs/reference/verify.md.

        Raises
        ------
        ProblemTooLarge
            Computing the reference would take longer than the server allows.
        ConvgradError
            As for `Client.conv_bwd_data`.

        Examples
        --------
        >>> found = client.verify("conv_bwd_data", mine, layer="ck_headline", seed=7)
        >>> found.passed, [each.sentence for each in found.findings]
        """
        call = verify_call(operation, result, second, doubled, linear or {}, fields)
        found: Verification
        if self._shared is not None:
            found = self._send_all(self._shared.examine(call, verify_target))
        else:
            found = self._complete(verify_target(call))
        return found

    def time(self, operation: str, **fields: Any) -> TimedPlan:
        """Time an operation on the server, on generated tensors, with the device to itself.

        Parameters
        ----------
        operation
            Name of the operation.
        **fields
            Either ``layer``, in any notation that `convgrad.layers` reads, or ``shapes`` and the
            operation's parameters. For ``dtype``, ``layout``, ``batch``, ``standard_error``,
            ``budget_s``, ``peers`` and ``candidates`` see docs/reference/verify.md.

        Raises
        ------
        Overloaded
            Too many timings are queued or running.
        ConvgradError
            As for `Client.conv_bwd_data`.

        Examples
        --------
        >>> timed = client.time("conv_bwd_data", layer="ck_headline", dtype="bfloat16")
        >>> timed.timings["cold"].median_s, timed.timings["cold"].reference_share
        """
        found: TimedPlan = self._complete(time_target(operation, fields))
        return found

    def plan(self, operation: str, **fields: Any) -> PlanExplained:
        """Explain which kernel would run, and why each other one would not; compute nothing.

        Parameters
        ----------
        operation
            Name of the operation.
        **fields
            As for `time`, except those that control the timing.

        Raises
        ------
        ConvgradError
            As for `Client.conv_bwd_data`.

        Examples
        --------
        >>> client.plan("conv_bwd_data", layer="ck_headline", dtype="bfloat16").plan.kernel
        """
        found: PlanExplained = self._complete(plan_target(operation, fields))
        return found


class AsyncExaminations:
    """Mixin of `AsyncClient`."""

    _complete: Callable[[Target[Any]], Awaitable[Any]]
    _send_all: Callable[[Requests[Any]], Awaitable[Any]]
    _shared: SharedMemory | None

    @described_like(Examinations.verify)
    async def verify(
        self,
        operation: str,
        result: Any,
        *,
        second: Any = None,
        doubled: Any = None,
        linear: Mapping[str, tuple[Any, Any]] | None = None,
        **fields: Any,
    ) -> Verification:
        """Check a result of your own against a float64 reference; see `Client.verify`.

        Examples
        --------
        >>> verdict = await client.verify("conv_fwd", y, input=x, weight=weight)
        """
        call = verify_call(operation, result, second, doubled, linear or {}, fields)
        found: Verification
        if self._shared is not None:
            found = await self._send_all(self._shared.examine(call, verify_target))
        else:
            found = await self._complete(verify_target(call))
        return found

    @described_like(Examinations.time)
    async def time(self, operation: str, **fields: Any) -> TimedPlan:
        """Time an operation on the server; see `Client.time`.

        Examples
        --------
        >>> timed = await client.time("conv_fwd", layer="ck_headline")
        """
        found: TimedPlan = await self._complete(time_target(operation, fields))
        return found

    @described_like(Examinations.plan)
    async def plan(self, operation: str, **fields: Any) -> PlanExplained:
        """Explain which kernel would run; see `Client.plan`.

        Examples
        --------
        >>> plan = await client.plan("conv_fwd", layer="ck_headline")
        """
        found: PlanExplained = await self._complete(plan_target(operation, fields))
        return found


def verify_call(
    operation: str,
    result: Any,
    second: Any,
    doubled: Any,
    linear: Mapping[str, tuple[Any, Any]],
    fields: Mapping[str, Any],
) -> Call[Any]:
    """Build a verification request; raise MalformedRequest as the server would."""
    from convgrad.contract.examinations import VERIFICATIONS

    arguments = dict(fields)
    outputs = _operation(operation).outputs
    roles = {"result": result, "second": second, "doubled": doubled}
    for tensor, (addend, total) in linear.items():
        roles |= {f"addend_{tensor}": addend, f"sum_{tensor}": total}
    for role, given in roles.items():
        if given is None:
            continue
        named = given if isinstance(given, Mapping) else {outputs[0]: given}
        arguments.update({f"{role}_{name}": array for name, array in named.items()})
    return _call(VERIFICATIONS[operation].request, arguments)


def verify_target(call: Call[Any]) -> Target[Verification]:
    """Make the target of a request built by `verify_call`."""
    from convgrad.contract.verification import Verification

    return _post(call, "safetensors" if call.tensors else "json", Verification)


def time_target(operation: str, fields: Mapping[str, Any]) -> Target[TimedPlan]:
    """Make the target of a timing request."""
    from convgrad.contract.examinations import TIMINGS
    from convgrad.contract.timing import TimedPlan

    _operation(operation)
    return _post(_call(TIMINGS[operation].request, fields), "json", TimedPlan)


def plan_target(operation: str, fields: Mapping[str, Any]) -> Target[PlanExplained]:
    """Make the target of a plan request."""
    from convgrad.contract import validate
    from convgrad.contract.examinations import PLANS
    from convgrad.contract.timing import PlanExplained

    _operation(operation)
    model = PLANS[operation].request
    given = {name: value for name, value in fields.items() if value is not None}
    asked = validate(model, given).parameters()
    query = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in asked.items()
    }
    path = f"{model.operation}?{urlencode(query)}"
    return Target("GET", path, None, _reader(PlanExplained))


def _operation(name: str) -> Any:
    from convgrad.contract import OPERATIONS

    if name not in OPERATIONS:
        raise MalformedRequest(
            f"there is no operation {name[:64]!r}; expected one of {', '.join(OPERATIONS)}"
        )
    return OPERATIONS[name]


def _call(model: Any, fields: Mapping[str, Any]) -> Call[Any]:
    from convgrad.contract import validate

    names = frozenset(model.tensor_fields())
    given = {name: value for name, value in fields.items() if value is not None}
    stored = {}
    for name in names & given.keys():
        if isinstance(given[name], Stored):
            stored[name], given[name] = given[name].name, given[name].blank()
        else:
            given[name] = as_tensor(name, given[name])
    request = validate(model, given)
    tensors = {name: array for name, array in request.tensors().items() if name not in stored}
    parameters = request.parameters() | ({"stored": stored} if stored else {})
    return Call(model.operation, tensors, parameters, dict)


def _post(call: Call[Any], wire: str, answer: type[BaseModel]) -> Target[Any]:
    headers = {"accept": "application/json"}
    return Target("POST", call.operation, WIRES[wire].body(call), _reader(answer), headers)


def _reader(answer: type[BaseModel]) -> Callable[[Reply, int], Any]:
    def read(reply: Reply, attempts: int) -> Any:
        try:
            return answer.model_validate(read_json(reply))
        except ValueError as refused:
            raise InvalidAnswer(f"the answer is not a {answer.__name__}: {refused}") from refused

    return read
