"""Summaries of a recurrent matrix's singular values."""

from torch import Tensor


def summarize_spectrum(singular_values: Tensor) -> dict[str, float]:
    """Mean, spread and extremes of singular values, as the paper's Figure 3 shows them (Vorontsov et al. 2017).

    Args:
        singular_values: [K] float, K at least 1. A free spectrum may hold negative numbers: then the singular values
            proper are their magnitudes, and those are summarised.

    Returns:
        "mean", "std" (of the K values, not an estimate for more of them: divided by K), "min", "max".
    """
    s = singular_values.detach().abs().double().cpu()
    return {
        "mean": s.mean().item(),
        "std": s.std(correction=0).item(),
        "min": s.min().item(),
        "max": s.max().item(),
    }
