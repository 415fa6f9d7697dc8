"""The two roles of a protocol machine."""

import enum


class Role(enum.Enum):
    """The side of the connection that a protocol machine is on: SERVER answers requests, CLIENT makes them."""

    SERVER = enum.auto()
    CLIENT = enum.auto()
