package peer

import "github.com/fingerpost/fingerpost/nodecache"

// Head is who of the nodes is in charge of the owner, if all live.
func Head(key nodecache.OwnerKey, nodes ...string) string {
	return first(key, nodes, func(string) bool { return true })
}
