"""placeholder until the worker lands"""

from cyclopts import App, Group


def add_to(app: App, group: Group) -> None:
    pass
