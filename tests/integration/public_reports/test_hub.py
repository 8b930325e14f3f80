"""Public reports about the hub interface."""

from pathlib import Path

import pytest

from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel
from tests.helpers.paths import REFERENCE

pytestmark = pytest.mark.slow


def test_hub_interface(data: Path) -> None:
    """fs 5610: from_pretrained could no longer load; two sentences of the published translations."""
    hub = SurfaceFusionModel.from_pretrained(str(REFERENCE), "checkpoint_best.pt", str(data))
    assert hub.translate("a horse sees a house", beam=4) == "un bur un kor@@ ka vidu"
    texts = ["today the slow bird hears a horse near the book", "a horse sees a house"]
    assert hub.translate(texts, beam=4)[0] == "nune lum talo un bur@@ ka gar@@ lo apud audu@@ s"


def test_hub_replaces_unknown_words(data: Path) -> None:
    hub = SurfaceFusionModel.from_pretrained(str(REFERENCE), "checkpoint_best.pt", str(data))
    size = len(hub.tgt_dict)
    translations = hub.translate(["zebra", ""], beam=2, replace_unk="", unkpen=-7, max_len_b=6)
    assert [set(line.split()) for line in translations] == [{"zebra"}, set()]
    assert len(hub.tgt_dict) == size
