package peer

import "github.com/fingerpost/fingerpost/nodecache"

// Over is the directory as an [Exchange] sees it.
func Over(d *nodecache.Directory) Directory { return over{d} }

type over struct{ *nodecache.Directory }

func (d over) Changes() Feed { return d.Subscribe() }
