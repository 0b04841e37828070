"""Every error that specdec raises on purpose.

SpecdecError
├── InvalidRequest          a field of a request is wrong; `param` names it (HTTP 400)
│   └── ContextTooLong      the prompt leaves no room for one more token (HTTP 400)
├── QueueFull               too many requests wait already; ask again later (HTTP 429)
├── ConstraintError         the grammar of one request failed while it ran
│   └── DeadEnd             the grammar allows no token at a place the text has reached (HTTP 422)
├── NumericalError          the model produced a row that is not a number (HTTP 500, this request only)
├── ModelError              a model's file is missing, corrupt, or of a kind we cannot run
└── ConfigError             an option of the engine is wrong, or two of them contradict each other
"""


class SpecdecError(Exception):
    """The root: catch this to catch all of ours. `code` is a stable, machine-readable word."""

    code = "internal_error"


class InvalidRequest(SpecdecError, ValueError):
    """A field of a request is wrong. `param` is the field's path as the caller spells it."""

    code = "invalid_value"

    def __init__(self, param: str, message: str, *, code: str | None = None) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message
        if code is not None:
            self.code = code


class ContextTooLong(InvalidRequest):
    """The prompt is as long as the context or longer."""

    code = "context_length_exceeded"


class QueueFull(SpecdecError):
    """The queue limit is reached; `retry_after` is in seconds."""

    code = "queue_full"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConstraintError(SpecdecError):
    """A grammar backend failed on committed tokens; the request ends, others go on."""

    code = "constraint_error"


class DeadEnd(ConstraintError):
    """The grammar (with bans applied) allows nothing at a row that the text has reached."""

    code = "constraint_dead_end"


class NumericalError(SpecdecError):
    """The target's logits are not numbers at a row that the text has reached."""

    code = "numerical_error"


class ModelError(SpecdecError):
    """A model's file is missing, corrupt, or of a kind that cannot be run. Names the file."""

    code = "model_error"


class ConfigError(SpecdecError, ValueError):
    """An option of the engine is wrong. Names the option."""

    code = "config_error"
