"""The commented catalog file that `paceline catalog --write` starts a reader off with."""

_EXAMPLE = """\
# What Paceline should know about your hardware. Put this file beside the job file under the name
# paceline-catalog.toml, or name it there: `cluster: {catalog: my.toml}`.
#
# Check it:    paceline catalog --file paceline-catalog.toml
# Look it up:  paceline catalog accelerators H100-SXM
#
# Rates are for one direction. Sizes and rates are plain numbers (bytes, bytes per second), or text
# with a unit: "80 GiB", "400Gb/s" (bits), "50GB/s" (bytes). Peaks are dense, without sparsity.

# Change some numbers of a known accelerator; everything else stays.
[accelerators.H100-SXM]
network = "roce-400"
network_node_bytes_per_s = "8x200Gb/s"     # all NICs of a node together
sources.network = "our racks"

# A new one that is like another.
[accelerators.H100-SXM-96]
like = "H100-SXM"
memory_bytes = "96 GiB"
smi_names = ["H100 96GB HBM3"]             # as nvidia-smi names it, so that it is recognised

# A new link. per: `port` is one NIC, `accelerator` all links of an accelerator together.
[links.campus-fibre]
kind = "tcp"
per = "port"
bytes_per_s = "40Gb/s"
latency_s = 80e-6
is_rdma = false
source = "measured with iperf3 and ping, 2026-09-01"

# What you pay. Replaces the shipped prices of the same provider and accelerator.
[[prices]]
provider = "us"
accelerator = "H100-SXM"
num_accelerators = 8
per_hour_usd = 16.00                       # the whole instance
spot_per_hour_usd = 9.60
as_of = "2026-09-01"
source = "our contract"
"""


def catalog_example() -> str:
    """The text; it loads without a problem.

    >>> catalog_example().startswith("# What Paceline should know")
    True
    """
    return _EXAMPLE
