"""``surface-fusion average``: average the parameters of several checkpoints."""

import os
from collections.abc import Sequence

import torch

from surface_fusion import averaging
from surface_fusion.cli.checkpoint_flags import add_trust_flag, trusted_checkpoints
from surface_fusion.cli.user_errors import OneLineParser
from surface_fusion.io.atomic_write import atomic_write


def _parser() -> OneLineParser:
    parser = OneLineParser(
        "average",
        "CHECKPOINT ... -o OUT",
        "(--last | --last-updates) N DIR -o OUT",
        description="Averages parameters in float64 and writes a checkpoint for generate, without optimizer "
        "state.",
    )
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="checkpoints of one model")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="output file")
    latest = parser.add_mutually_exclusive_group()
    latest.add_argument("--last", nargs=2, metavar=("N", "DIR"), help="the last N checkpointEPOCH.pt in DIR")
    latest.add_argument(
        "--last-updates", nargs=2, metavar=("N", "DIR"), help="the last N checkpoint_EPOCH_UPDATE.pt in DIR"
    )
    add_trust_flag(parser)
    return parser


def run(argv: Sequence[str]) -> None:
    """Write the average of the checkpoints and print their names in one line."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    paths = args.checkpoints
    count_and_folder = args.last or args.last_updates
    if bool(count_and_folder) == bool(paths):
        parser.error("give checkpoints, or --last N DIR, or --last-updates N DIR")
    if count_and_folder:
        count, folder = count_and_folder
        if not count.isdigit():
            parser.error(f"{count} is not a number of checkpoints")
        paths = averaging.last_checkpoints(folder, int(count), by_update=bool(args.last_updates))
    if os.path.realpath(args.output) in map(os.path.realpath, paths):
        parser.error(f"{args.output} is one of the checkpoints to average; write to another file")
    with atomic_write(args.output) as file, trusted_checkpoints(args.trust_checkpoint):
        torch.save(averaging.average_checkpoints(paths), file)
    size = os.path.getsize(args.output) / 1e6
    print(f"{args.output}: the mean of {len(paths)} checkpoints, {', '.join(paths)} ({size:.1f} MB)")
