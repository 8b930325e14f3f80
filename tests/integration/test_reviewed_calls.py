"""Every call in fairseq and here that could run code from a file is known, with what keeps it from that."""

from pathlib import Path

import fairseq
import fairseq_cli
import pytest

import surface_fusion
from tests.helpers.code_calls import calls

LITERAL = "parsed as a literal (compat/safe_eval.py)"
SAFE_LOAD = "torch's weights_only=True, the default of torch >= 2.6"
OWN_MODULES = "the modules of fairseq's own folder"
NO_SHELL = "replaced (compat/safe_readers.py)"
USER = "the user's own command line or environment"
BETWEEN_RANKS = "between the processes of one training"

REVIEWED: dict[tuple[str, str], str] = {
    ("fairseq/checkpoint_utils.py", "torch.load("): SAFE_LOAD,
    ("fairseq/criterions/__init__.py", "importlib.import_module('fairseq.criterions.'"): OWN_MODULES,
    ("fairseq/criterions/ctc.py", "eval("): LITERAL,
    ("fairseq/data/audio/__init__.py", "importlib.import_module(f'fairseq.data.audio."): OWN_MODULES,
    ("fairseq/data/audio/data_cfg.py", "yaml.load("): "replaced by the safe loader (compat/safe_readers.py)",
    ("fairseq/data/audio/raw_audio_dataset.py", "eval("): LITERAL,
    ("fairseq/data/codedataset.py", "eval("): LITERAL,
    ("fairseq/data/codedataset.py", "torch.load("): SAFE_LOAD,
    ("fairseq/data/encoders/__init__.py", "importlib.import_module('fairseq.data.encoders.'"): OWN_MODULES,
    ("fairseq/data/fasta_dataset.py", "import subprocess"): NO_SHELL,
    ("fairseq/data/fasta_dataset.py", "subprocess.check_output("): NO_SHELL,
    ("fairseq/data/plasma_utils.py", "import subprocess"): USER,
    ("fairseq/data/plasma_utils.py", "subprocess.Popen(['plasma_store'"): (
        "one program, without a shell; use_plasma_view of a file is refused (compat.checkpoint_allowlist.py)"
    ),
    ("fairseq/distributed/utils.py", "import pickle"): BETWEEN_RANKS,
    ("fairseq/distributed/utils.py", "pickle.dumps("): BETWEEN_RANKS,
    ("fairseq/distributed/utils.py", "pickle.loads("): BETWEEN_RANKS,
    ("fairseq/distributed/utils.py", "torch.load(buffer"): BETWEEN_RANKS,
    ("fairseq/distributed/utils.py", "import subprocess"): USER,
    ("fairseq/distributed/utils.py", "subprocess.check_output(['scontrol'"): USER,
    ("fairseq/file_utils.py", "import tarfile"): "extracts inside of its folder (compat/safe_readers.py)",
    ("fairseq/file_utils.py", "tarfile.open("): "extracts inside of its folder (compat/safe_readers.py)",
    ("fairseq/hub_utils.py", "file_utils.load_archive_file("): USER,
    ("fairseq/model_parallel/criterions/__init__.py", "importlib.import_module('fairseq.model_"): OWN_MODULES,
    ("fairseq/model_parallel/models/__init__.py", "importlib.import_module('fairseq.model_"): OWN_MODULES,
    ("fairseq/models/__init__.py", "importlib.import_module(namespace"): OWN_MODULES,
    ("fairseq/models/ema/__init__.py", "importlib.import_module('fairseq.models.ema.'"): OWN_MODULES,
    ("fairseq/models/fconv.py", "eval("): LITERAL,
    ("fairseq/models/fconv_lm.py", "eval("): LITERAL,
    ("fairseq/models/fconv_self_att.py", "eval("): LITERAL,
    ("fairseq/models/hubert/hubert.py", "eval("): LITERAL,
    ("fairseq/models/huggingface/__init__.py", "importlib.import_module('fairseq.models.hug"): OWN_MODULES,
    ("fairseq/models/lightconv_lm.py", "eval("): LITERAL,
    ("fairseq/models/multires_hubert/multires_hubert.py", "eval("): LITERAL,
    ("fairseq/models/speech_to_text/hub_interface.py", "torch.hub.load("): (
        "names no file but the data of a task that a file may not name"
    ),
    ("fairseq/models/speech_to_text/s2t_wav_transformer.py", "eval("): LITERAL,
    ("fairseq/models/speech_to_text/xm_transformer.py", "torch.load("): SAFE_LOAD,
    ("fairseq/models/text_to_speech/vocoder.py", "torch.load("): SAFE_LOAD,
    ("fairseq/models/transformer_lm.py", "eval("): LITERAL,
    ("fairseq/models/wav2vec/wav2vec.py", "eval("): LITERAL,
    ("fairseq/models/wav2vec/wav2vec2.py", "eval("): LITERAL,
    ("fairseq/modules/quantization/pq/em.py", "torch.load("): SAFE_LOAD,
    ("fairseq/optim/__init__.py", "importlib.import_module('fairseq.optim.'"): OWN_MODULES,
    ("fairseq/optim/adafactor.py", "eval("): LITERAL,
    ("fairseq/optim/adam.py", "eval("): LITERAL,
    ("fairseq/optim/adamax.py", "eval("): LITERAL,
    ("fairseq/optim/cpu_adam.py", "eval("): LITERAL,
    ("fairseq/optim/fused_adam.py", "importlib.import_module('fused_adam_cuda')"): OWN_MODULES,
    ("fairseq/optim/fused_lamb.py", "eval("): LITERAL,
    ("fairseq/optim/lr_scheduler/__init__.py", "importlib.import_module('fairseq.optim.lr_"): OWN_MODULES,
    ("fairseq/scoring/__init__.py", "importlib.import_module('fairseq.scoring.'"): OWN_MODULES,
    ("fairseq/scoring/bleu.py", "import ctypes"): OWN_MODULES,
    ("fairseq/scoring/bleu.py", "ctypes.cdll.LoadLibrary(libbleu.__file__)"): OWN_MODULES,
    ("fairseq/tasks/__init__.py", "importlib.import_module(namespace"): OWN_MODULES,
    ("fairseq/tasks/audio_pretraining.py", "import subprocess"): USER,
    ("fairseq/tasks/audio_pretraining.py", "subprocess.call("): (
        "post_save_script, of the user's command line; a file may not name this task"
    ),
    ("fairseq/utils.py", "eval(x)"): LITERAL,
    ("fairseq/utils.py", "importlib.import_module(module_name)"): "--user-dir, which no file sets",
    ("fairseq_cli/eval_lm.py", "eval(cfg.common_eval.model_overrides)"): USER,
    ("fairseq_cli/validate.py", "eval(getattr(override_args, 'model_overrides', '{}'))"): USER,
    (
        "surface_fusion/cli/main.py",
        "importlib.import_module(f'surface_fusion.cli.{verb}')",
    ): "a key of OWN_VERBS",
    ("surface_fusion/cli/fairseq_verbs.py", "importlib.import_module(f'fairseq_cli.{verb}')"): OWN_MODULES,
    ("surface_fusion/compat/checkpoint_integrity.py", "torch.load("): SAFE_LOAD,
    ("surface_fusion/compat/checkpoint_loading.py", "import pickle"): "its exceptions only",
    ("surface_fusion/compat/newest_checkpoint.py", "torch.load("): SAFE_LOAD,
    ("surface_fusion/compat/repairs.py", "importlib.import_module(f'{__package__}."): OWN_MODULES,
    ("surface_fusion/compat/safe_readers.py", "import tarfile"): "its filter of unsafe members",
}


@pytest.mark.parametrize("package", [fairseq, fairseq_cli, surface_fusion], ids=lambda p: p.__name__)
def test_every_call_that_could_run_code_is_reviewed(package: object) -> None:
    """A new one fails here: see what it reads, treat it, and write into the table what keeps it safe."""
    folder = Path(next(iter(package.__path__)))  # type: ignore[attr-defined]
    unknown = [
        f"{file}: {call}"
        for file, call in calls(folder)
        if not any(file == known and call.startswith(start) for known, start in REVIEWED)
    ]
    assert unknown == []


def test_the_scan_finds_calls_that_run_code(tmp_path: Path) -> None:
    lines = (
        *("import pickle as p", "from subprocess import run", "x = eval(y)", "exec(y)", "os.system(y)"),
        *("torch.load(y)", "np.load(y, allow_pickle=True)", "run(y, shell=flag)", "pickle.loads(y)"),
        *("subprocess.Popen(y)", "__import__(y)", "importlib.import_module(y)", "yaml.load(y)"),
        *("def f():\n    return [eval(z) for z in y]",),
    )
    harmless = ("model.eval()", "editdistance.eval(a, b)", "re.compile(x)", "np.load(y, allow_pickle=False)")
    (tmp_path / "module.py").write_text("\n".join((*lines, *harmless)))
    found = list(calls(tmp_path))
    assert len(found) == len(lines)
    assert {file for file, _ in found} == {f"{tmp_path.name}/module.py"}
