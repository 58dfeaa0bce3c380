package nodecache

// Sizes returns the number of entries of every map of the directory that has
// any, for tests that nothing is left behind.
func (d *Directory) Sizes() map[string]int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	sizes := map[string]int{
		"owners": len(d.owners), "pods": len(d.pods), "claims": len(d.claims), "rivals": len(d.rivals),
		"infos": len(d.infos), "routes": len(d.routes), "routesOf": len(d.routesOf), "subs": len(d.subs),
		"fronts": len(d.fronts.byName), "slices": len(d.fronts.slices), "behind": len(d.fronts.behind), "rememberers": len(d.fronts.rememberers),
	}
	for s, n := range d.states {
		sizes["state "+PodState(s).String()] = n
	}
	for name, n := range sizes {
		if n == 0 {
			delete(sizes, name)
		}
	}
	return sizes
}
