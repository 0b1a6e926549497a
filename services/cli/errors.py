"""How the command fails."""

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """Something that the user can mend; the message says what. Shown without a traceback."""

    def __init__(self, message: str, exit_status: int = EXIT_ERROR) -> None:
        super().__init__(message)
        self.exit_status = exit_status
