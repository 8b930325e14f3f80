"""``Translator``: translate, score and explain text with a trained model, from its folder alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig

from surface_fusion.analysis.explain import explain, loaded_pair
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.inference.model_folder import find_model
from surface_fusion.models.hub_interface import Hypothesis
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel


class Translation(NamedTuple):
    """A translation and its scores; those of a line that is not translated are -inf."""

    text: str
    score: float
    """Sum of :attr:`token_scores`, divided by the number of tokens to the power of *lenpen*."""
    tokens: list[str]
    """Subwords, and ``</s>``."""
    token_scores: list[float]
    """Log-probability of each token."""
    ids: list[int]
    """Ids of the tokens in the target dictionary."""


class Translator:
    """A trained model, its dictionaries and the subword model that segments text.

    Args:
        model_dir: the folder of the model, see :func:`surface_fusion.inference.model_folder.find_model`.
        checkpoint: name of the checkpoint; by default ``checkpoint_best.pt`` or ``checkpoint_last.pt``.
        device: where to translate; by default the first GPU if there is one.
        half: translate in float16; for a GPU.
        batch_size: maximum number of lines that are translated at once.
        moses: tokenise lines and detokenise translations by sacremoses, if the training text was tokenised.

    Attributes:
        hub: the :class:`surface_fusion.models.hub_interface.TranslationHub`.

    Raises:
        SurfaceFusionError: a file is missing or not a safe checkpoint of a supported model.
    """

    def __init__(
        self,
        model_dir: str | Path,
        checkpoint: str | None = None,
        *,
        device: str | torch.device | None = None,
        half: bool = False,
        batch_size: int = 64,
        moses: bool = False,
    ) -> None:
        files = find_model(Path(model_dir), checkpoint)
        self.hub = SurfaceFusionModel.from_pretrained(
            str(files.checkpoint.parent),
            files.checkpoint.name,
            str(files.dictionaries.absolute()),  # the hub takes ./ and ../ as relative to the checkpoint
            batch_size=batch_size,
            **files.bpe_settings,
        )
        self.hub.eval()
        if moses:
            languages = self.hub.task.cfg.source_lang, self.hub.task.cfg.target_lang
            self.hub.tokenizer = MosesTokenizer(MosesTokenizerConfig(None, *languages))
        if half:
            self.hub.half()
        self.hub.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @overload
    def translate(self, text: str, *, beam: int = ..., **settings: Any) -> Translation: ...
    @overload
    def translate(self, text: Sequence[str], *, beam: int = ..., **settings: Any) -> list[Translation]: ...
    def translate(
        self, text: str | Sequence[str], *, beam: int = 4, **settings: Any
    ) -> Translation | list[Translation]:
        """Translate a line or several: one translation for each, in their order.

        An empty line has an empty translation. So has one that exceeds the model's positions; a warning
        gives its number.

        Args:
            text: a line or several.
            beam: the beam size.
            **settings: fields of fairseq's ``GenerationConfig``, such as *lenpen*, *max_len_b* or *min_len*.

        Raises:
            SurfaceFusionError: a setting is unknown or out of range.
        """
        if isinstance(text, str):
            return self.translate([text], beam=beam, **settings)[0]
        return [best for best, *_ in self.nbest(text, 1, beam=beam, **settings)]

    def nbest(
        self, lines: Sequence[str], n: int, *, beam: int = 4, first_line: int = 1, **settings: Any
    ) -> list[list[Translation]]:
        """Translate several lines: at most *n* translations for each, the best first.

        Args:
            lines: the lines; a list, not a string.
            n: 1 to *beam*.
            beam, **settings: as for :meth:`translate`.
            first_line: number of the first line in warnings.

        Raises:
            SurfaceFusionError: *lines* is a string, *n* is out of range, or a setting is invalid.
        """
        if isinstance(lines, str):
            raise SurfaceFusionError("nbest takes a list of lines, not a string; give [line]")
        rows = [self.hub.encode(line.strip()) for line in lines]
        results = self.hub.generate(rows, beam, nbest=n, first_line=first_line, **settings)
        return [[self._translation(hypothesis) for hypothesis in hypotheses] for hypotheses in results]

    @overload
    def score(self, src: str, tgt: str) -> Translation: ...  # type: ignore[overload-overlap]
    @overload
    def score(self, src: Sequence[str], tgt: Sequence[str]) -> list[Translation]: ...
    def score(self, src: str | Sequence[str], tgt: str | Sequence[str]) -> Translation | list[Translation]:
        """Score given translations *tgt* of the lines *src*, a line or several of each.

        Raises:
            SurfaceFusionError: the numbers of lines differ.
        """
        if isinstance(src, str):
            return self._translation(self.hub.score(src, tgt))
        return [self._translation(hypothesis) for hypothesis in self.hub.score(src, tgt)]

    def explain(self, src: str, tgt: str | Translation | None = None, out: str | Path | None = None) -> str:
        """Return a table with a row per token of a translation of the line *src*.

        It has the prediction of each branch of a fusion model, and the source token that each attention
        reads most.

        Args:
            src: the line.
            tgt: the translation; by default the model's.
            out: folder to also write tables and heat maps to.
        """
        if isinstance(tgt, str):
            target = self.hub.encode_target(tgt.strip())
        else:
            target = torch.tensor((self.translate(src) if tgt is None else tgt).ids)
        pair = loaded_pair(self.hub.models[0], self.hub.task, self.hub.encode(src.strip()).cpu(), target)
        return "\n".join(explain(pair, None if out is None else Path(out)))

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        tokens = hypothesis["tokens"].cpu()
        return Translation(
            self.hub.decode(tokens),
            float(hypothesis["score"]),
            [self.hub.tgt_dict[i] for i in tokens],
            hypothesis["positional_scores"].tolist(),
            tokens.tolist(),
        )
