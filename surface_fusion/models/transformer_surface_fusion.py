"""``transformer_surface_fusion``: fairseq's Transformer with surface fusion and encoder layer fusion."""

from argparse import ArgumentParser
from typing import Any

from fairseq import hub_utils
from fairseq.models import register_model
from fairseq.models.transformer import TransformerModelBase

from surface_fusion.config.flags import SurfaceFusionConfig
from surface_fusion.config.layers_to_keep import normalise_layers_to_keep
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.build_fusion import with_extra_layers
from surface_fusion.models.decoder import SurfaceFusionDecoder
from surface_fusion.models.encoder import SurfaceFusionEncoder
from surface_fusion.models.hub_interface import MAX_TOKENS, TranslationHub
from surface_fusion.models.upgrade_state_dict import adapt_state_dict
from surface_fusion.modules.module_tree import ModuleTree
from surface_fusion.packed.parameter_groups import group_parameters

MODEL_NAME = "transformer_surface_fusion"


@register_model(MODEL_NAME)
class SurfaceFusionModel(TransformerModelBase):
    """Transformer with surface fusion and encoder layer fusion; without these flags, a plain Transformer.

    With ``--sf-plain`` and no fusion flag, it consists of fairseq's own encoder and decoder.
    """

    def __init__(self, cfg: Any, encoder: Any, decoder: Any) -> None:
        super().__init__(cfg, encoder, decoder)
        self.module_tree = ModuleTree(SurfaceFusionModel.train, SurfaceFusionDecoder.train)

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add the model's flags to *parser*."""
        SurfaceFusionConfig.add_args(parser)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SurfaceFusionModel":
        """Build a model from the Namespace of a command line or old checkpoint, or from a YAML config.

        Raises:
            SurfaceFusionError: the value of a flag is invalid.
        """
        normalise_layers_to_keep(cfg)
        cfg = SurfaceFusionConfig.from_namespace(cfg)
        src_dict, tgt_dict = task.source_dictionary, task.target_dictionary
        if cfg.share_all_embeddings and src_dict != tgt_dict:
            raise SurfaceFusionError(
                f"--share-all-embeddings needs one dictionary, but the source has {len(src_dict)} entries "
                f"and the target {len(tgt_dict)}; preprocess with --joined-dictionary, or leave the flag out"
            )
        model: SurfaceFusionModel = super().build_model(cfg, task)
        group_parameters(model)
        return model

    @classmethod
    def build_encoder(cls, cfg: SurfaceFusionConfig, src_dict: Any, embed_tokens: Any) -> Any:
        """Build the encoder; with ``--sf-plain`` fairseq's, if it implements all the flags."""
        cfg = with_extra_layers(cfg)
        if cfg.fairseqs_own:
            return super().build_encoder(cfg, src_dict, embed_tokens)
        return SurfaceFusionEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: SurfaceFusionConfig, tgt_dict: Any, embed_tokens: Any) -> Any:
        """Build the decoder; with ``--sf-plain`` fairseq's, if it implements all the flags."""
        if cfg.fairseqs_own:
            return super().build_decoder(cfg, tgt_dict, embed_tokens)
        return SurfaceFusionDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str = "model.pt",
        data_name_or_path: str = ".",
        **kwargs: Any,
    ) -> TranslationHub:
        """Load a trained model for translating text.

        Args:
            model_name_or_path: the folder of the checkpoint.
            checkpoint_file: its file name; several names separated by ``:`` form an ensemble.
            data_name_or_path: the folder of the dictionaries.
            **kwargs: settings that override those in the checkpoint. *max_tokens* and *batch_size* limit the
                batches to translate; the training's settings do not.
        """
        loaded = hub_utils.from_pretrained(
            model_name_or_path, checkpoint_file, data_name_or_path, archive_map=cls.hub_models(), **kwargs
        )
        settings = loaded["args"].dataset
        settings.batch_size = kwargs.get("batch_size")
        settings.max_tokens = kwargs.get("max_tokens", MAX_TOKENS if settings.batch_size is None else None)
        return TranslationHub(loaded["args"], loaded["task"], loaded["models"])

    def train(self, mode: bool = True) -> "SurfaceFusionModel":
        """Set the mode as torch does; without ``--sf-plain``, return at once if all modules are in *mode*."""
        if self.cfg.sf_plain or not self.module_tree.in_mode(self, mode):
            super().train(mode)
        return self

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of updates as fairseq does; without ``--sf-plain``, only in modules that use it."""
        if self.cfg.sf_plain:
            super().set_num_updates(num_updates)
        else:
            self.module_tree.set_num_updates(self, num_updates)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Adapt checkpoints of the published code and plain Transformers (``upgrade_state_dict.py``)."""
        super().upgrade_state_dict_named(state_dict, name)
        adapt_state_dict(self, state_dict)
