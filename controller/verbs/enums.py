"""pyverbs' enumerations under one name, and completion statuses by theirs."""

from __future__ import annotations

try:
    import pyverbs.enums as verbs
except ImportError:  # its name in newer releases
    import pyverbs.libibverbs_enums as verbs

__all__ = ["status_name", "verbs"]

# enum ibv_wc_status of <infiniband/verbs.h>, in order. pyverbs has no way from number to name.
_STATUSES = (
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR",
    "MW_BIND_ERR", "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR",
    "REM_OP_ERR", "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR", "INV_EECN_ERR", "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR",
    "GENERAL_ERR", "TM_ERR", "TM_RNDV_INCOMPLETE",
)  # fmt: skip


def status_name(status: int) -> str:
    """Name of a work completion's status, without its prefix IBV_WC_."""
    return _STATUSES[status] if 0 <= status < len(_STATUSES) else f"status {status}"
