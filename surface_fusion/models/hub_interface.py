"""The Python interface for translating text, which ``SurfaceFusionModel.from_pretrained`` returns."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from fairseq import utils
from fairseq.data import LanguagePairDataset
from fairseq.hub_utils import GeneratorHubInterface
from omegaconf import open_dict
from torch import Tensor

from surface_fusion.compat.hub import fitting, in_order, position_limit
from surface_fusion.compat.search_options import copy_source_words
from surface_fusion.config.ranges import check_ranges
from surface_fusion.config.validation import check_names_of_generation
from surface_fusion.errors import SurfaceFusionError

MAX_TOKENS = 12000  # of a batch, the default

Hypothesis = dict[str, Any]
Sentences = str | Sequence[str]


class TranslationHub(GeneratorHubInterface):
    """fairseq's hub interface for translation models.

    It returns one result per line, in the order of the lines. The translation of an empty line is empty. So
    is that of a line that exceeds the model's positions; a warning gives its number.
    """

    def translate(self, sentences: Sentences, beam: int = 5, verbose: bool = False, **kwargs: Any) -> Any:
        """Translate *sentences*.

        Args:
            sentences: one line or several.
            beam, verbose: as in fairseq.
            **kwargs: *nbest*, and further fields of fairseq's ``GenerationConfig``, such as *lenpen*.

        Returns:
            A string per sentence; with *nbest* above 1, a list of at most *nbest* strings, the best first.
            For a single string, its result instead of a list of results.

        Raises:
            SurfaceFusionError: *nbest* is not 1 to *beam*, or a setting is unknown or out of range.
        """
        return self.sample(sentences, beam, verbose, **kwargs)

    def sample(self, sentences: Sentences, beam: int = 1, verbose: bool = False, **kwargs: Any) -> Any:
        """Same as :meth:`translate`, with a default beam size of 1."""
        if isinstance(sentences, str):
            return self.sample([sentences], beam, verbose, **kwargs)[0]
        results = self.generate([self.encode(sentence) for sentence in sentences], beam, verbose, **kwargs)
        align_dict = utils.load_align_dict(kwargs.get("replace_unk", self.cfg.generation.replace_unk))
        texts = [
            [self._text(sentence, hypothesis, align_dict) for hypothesis in hypotheses]
            for sentence, hypotheses in zip(sentences, results, strict=True)
        ]
        nbest = kwargs.get("nbest") or self.cfg.generation.nbest
        return [nbest_list[:nbest] if nbest > 1 else nbest_list[0] for nbest_list in texts]

    def _text(self, sentence: str, hypothesis: Hypothesis, align_dict: dict[str, str] | None) -> str:
        if align_dict is None:
            return str(self.decode(hypothesis["tokens"]))
        source = self.apply_bpe(self.tokenize(sentence)).split()
        pieces, unk = self.string(hypothesis["tokens"]), self.tgt_dict.unk_string()
        known = copy_source_words(pieces, unk, source, hypothesis["alignment"], align_dict)
        return str(self.detokenize(self.remove_bpe(known)))

    def generate(
        self,
        tokenized_sentences: Any,
        beam: int = 5,
        verbose: bool = False,
        *args: Any,
        nbest: int | None = None,
        first_line: int = 1,
        **kwargs: Any,
    ) -> Any:
        """Generate hypotheses of *tokenized_sentences*, rows of token ids that end in ``</s>``.

        Args:
            tokenized_sentences: one row or several.
            beam, verbose, *args, **kwargs: as in fairseq.
            nbest: number of hypotheses to return per row; None for all.
            first_line: number of the first row in warnings.

        Returns:
            A list of hypotheses per row, the best first. For a single row, its list alone. A row that is not
            translated has one hypothesis, ``</s>`` with the score -inf.

        Raises:
            SurfaceFusionError: as for :meth:`translate`.
        """
        keywords = ("skip_invalid_size_inputs", "inference_step_args", "prefix_allowed_tokens_fn")
        _check_settings({"beam": beam, **kwargs}, keywords)  # and the fields of GenerationConfig
        if nbest is not None and not 1 <= nbest <= beam:
            raise SurfaceFusionError(f"nbest {nbest} with beam {beam}; give a number from 1 to {beam}")
        if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
            kwargs |= {"nbest": nbest, "first_line": first_line}
            return self.generate([tokenized_sentences], beam, verbose, *args, **kwargs)[0]
        rows, blank = list(tokenized_sentences), {self.src_dict.eos(), self.src_dict.pad()}
        fits = fitting(rows, position_limit(self.max_positions, "source"), first_line)
        indices = [i for i in fits if not blank.issuperset(rows[i].tolist())]
        results = super().generate([rows[i] for i in indices], beam, verbose, *args, **kwargs)
        ordered = in_order(results, indices, len(rows), self.tgt_dict.eos())
        return [hypotheses[:nbest] for hypotheses in ordered]

    def score(self, sentences: Sentences, translations: Sentences | None = None, **kwargs: Any) -> Any:
        """Score given *translations* of *sentences*.

        Args:
            sentences: one line or several.
            translations: one for each sentence.
            **kwargs: fields of fairseq's ``GenerationConfig``.

        Returns:
            A hypothesis per pair: ``tokens`` of the translation, their log probabilities
            ``positional_scores``, and their mean ``score``. A pair that exceeds the model's positions has the
            single token ``</s>`` and the score -inf. For a single string, its hypothesis alone.

        Raises:
            SurfaceFusionError: sentences and translations differ in number, or a setting is invalid.
        """
        _check_settings(kwargs)
        given = [translations] if isinstance(translations, str) else translations or []
        if isinstance(sentences, str):
            return self.score([sentences], given, **kwargs)[0]
        if isinstance(translations, str) or len(given) != len(sentences):
            raise SurfaceFusionError(
                f"score: {len(sentences)} sentences but {len(given)} translations; give one for each sentence"
            )
        source = [self.encode(sentence) for sentence in sentences]
        target = [self.encode_target(translation) for translation in given]
        limits = self.max_positions
        fits = fitting(source, position_limit(limits, "source"), result="it is not scored")
        target_fits = fitting(target, position_limit(limits, "target"), result="it is not scored")
        indices = sorted({*fits}.intersection(target_fits))
        scored = self._score([source[i] for i in indices], [target[i] for i in indices], kwargs)
        return [hypotheses[0] for hypotheses in in_order(scored, indices, len(source), self.tgt_dict.eos())]

    def encode_target(self, translation: str) -> Tensor:
        """Token ids of a *translation*, which end in ``</s>``; ``encode`` does this for the source."""
        pieces = self.apply_bpe(self.tokenize(translation))
        ids: Tensor = self.tgt_dict.encode_line(pieces, add_if_not_exist=False).long()
        return ids

    def _score(
        self, source: list[Tensor], target: list[Tensor], settings: dict[str, Any]
    ) -> list[list[Hypothesis]]:
        if not source:
            return []
        generation = copy.deepcopy(self.cfg.generation)
        with open_dict(generation):
            generation.update({**settings, "score_reference": True})
        scorer = self.task.build_generator(self.models, generation)
        batches = self.task.get_batch_iterator(
            dataset=pair_dataset(self.task, source, target),
            max_tokens=max(self.cfg.dataset.max_tokens or 0, *map(len, source), *map(len, target)),
            max_sentences=self.cfg.dataset.batch_size,
            disable_iterator_cache=True,
        ).next_epoch_itr(shuffle=False)
        results: dict[int, list[Hypothesis]] = {}
        for batch in batches:
            batch = utils.apply_to_sample(lambda t: t.to(self.device), batch)
            scored = self.task.inference_step(scorer, self.models, batch)
            results.update(zip(batch["id"].tolist(), scored, strict=True))
        return [results[i] for i in range(len(source))]


def pair_dataset(task: Any, source: list[Tensor], target: list[Tensor]) -> Any:
    """Return a data set of *task* with rows of token ids that end in ``</s>``, one source for each target."""
    source_sizes, target_sizes = ([*map(len, rows)] for rows in (source, target))
    return LanguagePairDataset(
        *(source, source_sizes, task.source_dictionary, target, target_sizes, task.target_dictionary),
        left_pad_source=task.cfg.left_pad_source,
        left_pad_target=task.cfg.left_pad_target,
    )


def _check_settings(settings: dict[str, Any], further: Iterable[str] = ()) -> None:
    check_names_of_generation(settings, further=further)
    check_ranges(settings)
