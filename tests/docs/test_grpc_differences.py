"""The page that says where Triton differs over gRPC has what the test beside Triton holds."""

from tests.docs.pages import ROOT
from tests.interop.triton_grpc_differences import table


def test_the_page_has_every_difference_from_triton_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "grpc-differences.md").read_text(encoding="utf-8")
    assert table() in page
