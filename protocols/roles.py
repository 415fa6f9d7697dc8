"""Which end of a connection a machine plays."""

import enum


class Role(enum.Enum):
    """The side of the connection a protocol machine stands on: it answers requests (SERVER) or makes them (CLIENT)."""

    SERVER = enum.auto()
    CLIENT = enum.auto()
