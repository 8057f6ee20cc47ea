"""torchrun that can be started again on one node: `python -m ddp_lab.torchrun OPTIONS -m ddp_lab OVERRIDES`.

It takes torchrun's options. torchrun itself (torch 2.14) gives the address of the ranks' store only to those torchruns that
take part in its first round: one that is started again later does not find the others. With an environment variable on all
nodes, rank 0 opens a store of its own at each start of the ranks, and every torchrun gets its address. This sets the variable.
"""

import os

from torch.distributed.run import main

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

if __name__ == "__main__":
    os.environ.setdefault(OWN_STORE, "1")
    main()
