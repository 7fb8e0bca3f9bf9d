"""A script as the oneCCL bindings for PyTorch had them: rank and size from PMI, its own address, children started afresh."""

import multiprocessing
import os
import sys

import oneccl_bindings_for_pytorch  # noqa: F401  (registered the backend)
import torch
import torch.distributed as dist
import torch.utils.data


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index + imported_in_a_child()


def imported_in_a_child() -> int:
    import intel_extension_for_pytorch as ipex
    import torch_ccl  # noqa: F401

    return int(hasattr(ipex, "fast_bert"))


if __name__ == "__main__":
    os.environ["RANK"] = os.environ.get("PMI_RANK", "0")
    os.environ["WORLD_SIZE"] = os.environ.get("PMI_SIZE", "1")
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
    if sys.argv[1] == "variables":
        os.environ.update(own)
        dist.init_process_group("ccl")
    else:
        address = f"tcp://{own['MASTER_ADDR']}:{own['MASTER_PORT']}"
        rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
        dist.init_process_group("ccl", init_method=address, rank=rank, world_size=size)
    assert os.environ["MPI_LOCALRANKID"] == os.environ["LOCAL_RANK"]
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.barrier()
    children = {}
    if dist.get_rank() == 0:
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                children[method] = pool.apply(imported_in_a_child)
        loader = torch.utils.data.DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context="spawn")
        children["loader"] = [int(one) for one in next(iter(loader))]
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x.tolist()} {children}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
