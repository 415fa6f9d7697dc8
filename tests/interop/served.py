"""Models that the interop tests serve beside the library's."""

from models.errors import ModelError
from models.messages import Part
from models.session import Session


async def failing(session: Session[Part, Part]) -> None:
    """Echoes parts until one says fail, or crash."""
    async for part in session:
        match bytes(part.data):
            case b"fail":
                raise ModelError("the part said fail", code="SaidFail")
            case b"crash":
                raise RuntimeError("a secret of the server")
        await session.send(part)
