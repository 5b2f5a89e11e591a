-- Give a calendar counter in doubt what the ledger has of its window until the doubt began: {start, since, sum}. What
-- leases held then and all that changed after is kept.
local start, since, sum = unpack(request)
local key, field = KEYS[FIRST + 1], int(start)
local doubt, shift, more = 'd' .. field, 'o' .. field, 'w' .. field
local known = redis.call('HMGET', key, field, doubt, shift, more)
if not known[1] or tonumber(known[2] or 0) ~= since then return answer('corrected', epoch, 0) end
redis.call('HSET', key, field, int(math.max(0, tonumber(known[1]) + tonumber(known[3]) + sum)), 'a' .. field, int(since))
redis.call('HDEL', key, doubt, shift, more)
if known[4] then calendar_doubt(key, start) end
return answer('corrected', epoch, 1)
