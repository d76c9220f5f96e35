"""The `validate` command: a config is checked here, its data and its model by an engine that then leaves."""

from typing import Any

import msgspec

from trainwire_protocol import commands as c
from trainwire_protocol.channel import Answer, AnyReport, Check
from trainwire_protocol.config import Config
from trainwire_protocol.errors import ConfigInvalid, TrainwireError

from .engine_link import check_engine_installed
from .engine_session import Departure, start_engine
from .prepare import folder_problem
from .request import request_from_command
from .state import RunState


def _invalid(code: str, message: str) -> dict[str, Any]:
    """Make the result for data or a model that cannot be used."""
    return {"valid": False, "issues": [{"path": "", "code": code, "message": message}]}


class Validation:
    """Checks configs for a client, one at a time, while there is no run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._order: int | None = None
        self._config: Config | None = None

    @property
    def running(self) -> bool:
        """True while a `validate` command waits for its engine."""
        return self._order is not None

    def check(self, command: c.Validate, order: int) -> None:
        """Answer `validate`: at once if the config is wrong, else when an engine has looked at the data."""
        state = self._state
        try:
            request = request_from_command(command.config, state.options, resume=None, overwrite=False, linger=False)
            if state.options.engine == "mlx":
                check_engine_installed()
            state.engine = start_engine(state.options, -1, state.timers, state.show_output, self._on_report)
        except ConfigInvalid as error:
            issues = error.details.get("issues")
            refused = {"valid": False, "issues": issues} if issues else _invalid(error.code, error.message)
            state.desk.answer(order, refused, None)
            return
        except TrainwireError as error:
            state.desk.answer(order, None, error)
            return
        self._order, self._config = order, request.config
        state.engine.send(
            Check(
                order=order,
                config=msgspec.to_builtins(request.config),
                offline=state.options.offline,
                trust_remote_code=state.options.trust_remote_code,
                blas=state.options.blas,
            )
        )

    def _on_report(self, report: AnyReport) -> None:
        if isinstance(report, Answer) and report.order == self._order:
            result = report.result if report.code is None else _invalid(report.code, report.message or "")
            self._answer(report.order, result or {})

    def engine_left(self, departure: Departure) -> None:
        """Answer for an engine that left; it has nothing more to say."""
        order, self._order = self._order, None
        failed = departure.failed
        if order is not None and failed is not None:
            self._answer(order, _invalid(failed.code, failed.message))
        elif order is not None:
            self._state.desk.answer(order, None, departure.as_error(None))

    def _answer(self, order: int, result: dict[str, Any]) -> None:
        problem = folder_problem(self._config) if self._config is not None else None
        if problem is not None:
            issue = {"path": "run_dir", "code": problem.code, "message": problem.message}
            result = {**result, "valid": False, "issues": [*result.get("issues", []), issue]}
        self._state.desk.answer(order, result, None)
