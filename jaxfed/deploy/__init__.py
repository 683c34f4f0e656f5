"""Federations on separate machines, by engines that exist: `jaxfed.deploy.flower`."""

from jaxfed.deploy import flower as flower
