-- Give a cold calendar counter its base, unless somebody already has: {start, stop, base, complete until}.
local start, stop, base, complete = unpack(request)
local key, field, pending = KEYS[FIRST + 1], int(start), 'p' .. int(start)
if redis.call('HEXISTS', key, field) == 1 then return answer('hydrated', epoch, 0) end
for _, name in ipairs(redis.call('HKEYS', key)) do
  local of = tonumber(string.match(name, '%d+'))
  if of < start - (stop - start) * 1.2 then redis.call('HDEL', key, name) end
  -- A window that overlaps this one is of the zone before: should it come back it is summed anew.
  if name == int(of) and of > start - (stop - start) * 0.9 and of < stop then
    redis.call('HDEL', key, name, 'a' .. name, 'd' .. name, 'o' .. name, 'w' .. name)
  end
end
redis.call('HSET', key, field, int(base + tonumber(redis.call('HGET', key, pending) or 0)), 'a' .. field, int(complete))
redis.call('HDEL', key, pending, 'd' .. field, 'o' .. field, 'w' .. field)
calendar_keep(key, stop)
return answer('hydrated', epoch, 1)
