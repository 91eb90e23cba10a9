"""Models over several devices with ``jax.sharding``: sharded by heads (`heads`), or by time of a prompt (`time`)."""

from jax.sharding import AxisType, Mesh


def automatic(mesh: Mesh) -> Mesh:
    """Return the mesh with Auto axes: where arrays of a model are spread, the compiler decides how its results are."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
