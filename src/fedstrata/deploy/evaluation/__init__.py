"""Evaluations at the sites: the server's request, a site's reply, and the summary over all sites."""
