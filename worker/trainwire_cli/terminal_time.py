"""Shows durations to people."""


def as_clock(milliseconds: float | None) -> str:
    """Give h:mm:ss or m:ss; `?` for an unknown one."""
    if milliseconds is None:
        return "?"
    minutes, seconds = divmod(int(milliseconds / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
