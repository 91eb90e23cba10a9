"""Whether a device can be used here."""

from __future__ import annotations

import torch

from refold.errors import DeviceError


def usable(device: str | torch.device, what: str = "device") -> torch.device:
    """Find a device that is there, and computes.

    Args:
        device: The device, as PyTorch names it.
        what: What names it, for the error.

    Raises:
        DeviceError: It is not there, or has no numbers, as ``meta``.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place).cpu()
    except (RuntimeError, AssertionError) as error:  # the second where torch was built without CUDA
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceError(
            f"{what} {str(device)!r} cannot be used here: {reason}. Name one that is there, such as cpu."
        ) from error
    return place
